"""Finds whether a checkpoint's head is the embedding's table, as config.json may say without being right. Torch-free.

Fine-tunes that trained both tables are saved beside a config.json whose `tie_word_embeddings` is still true, or whose
family ties them by default. The head that is stored counts, as in transformers. Called by load_spec().
"""

from dataclasses import replace
from pathlib import Path

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.equal_values import equal_values
from tandem.parallel.stored.headers import StoredTensor, find_weights, read_header
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.parameter_names import ParameterNames, Role


def with_stored_head(spec: ArchSpec, folder: Path, names: ParameterNames) -> ArchSpec:
    """Returns the model with a head of its own, and a remark, where the folder holds one that is not the embedding's
    table; else the spec as it is, also for a folder whose weights are not there or are not read."""
    if not spec.tie_word_embeddings:
        return spec
    head = names.stored("", Role.HEAD, "weight")
    embedding = names.stored("", Role.EMBEDDING, "weight")
    embedding = (*embedding, *(name.removeprefix(names.base_prefix) for name in embedding))
    pair = _both(folder, head, embedding)
    if pair is None or equal_values(*pair):
        return spec
    own, table = pair
    remark = (
        f"{own.name} is stored with other values than {table.name}: the model keeps it as its head, as transformers "
        "does, though by config.json the two are one (tie_word_embeddings); false there says so"
    )
    return replace(spec, tie_word_embeddings=False, remarks=(*spec.remarks, remark))


def _both(folder: Path, head: tuple[str, ...], embedding: tuple[str, ...]) -> tuple[StoredTensor, StoredTensor] | None:
    """Returns the tensors of both tables, each stored under one of its names; None where one is not there."""
    try:
        own = _stored(folder, head)
        table = None if own is None else _stored(folder, embedding)
    except SettingsError:  # those who read the weights say what is wrong with them
        return None
    return None if own is None or table is None else (own, table)


def _stored(folder: Path, names: tuple[str, ...]) -> StoredTensor | None:
    """Returns the tensor that has one of the names. Reads the index, where there is one, and the headers of the files
    that may hold it."""
    files, index = find_weights(folder)
    if index is not None:
        files = [folder / index[name] for name in names if name in index]
    for file in files:
        header = read_header(file)
        for name in names:
            if name in header:
                return header[name]
    return None
