"""The names that the model has for the tensors of a GGUF file. Torch-free.

llama.cpp has one tensor for a matrix of all experts of a layer: each expert's is a part of it, as its own checkpoint
has it, since blocks do not cross rows.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from tandem.configs.errors import UnsupportedModelError
from tandem.parallel.stored.gguf_header import GgufFile
from tandem.parallel.stored.headers import StoredTensor
from tandem.workers.gguf.gguf_rope import ROPE_TENSORS
from tandem.workers.gguf.gguf_rows import EXPERTS, OUTSIDE, ROWS, SHARED, STEMS, WITH_EXPERTS, GgufRow
from tandem.workers.models.spec.family_rows.families import family_of
from tandem.workers.models.spec.parameter_names import ParameterNames, Role

LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")


def gguf_row(file: GgufFile) -> tuple[str, GgufRow]:
    """Returns a file's architecture. UnsupportedModelError for one that is not read."""
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{file.file} is GGUF of a {kind}, not of a model", "MODEL")
    if name not in ROWS:
        raise UnsupportedModelError(
            f"{file.file}: GGUF of the architecture {name!r} is not read; read are {', '.join(ROWS)}. Others are "
            "served from their checkpoints in safetensors",
            "MODEL",
        )
    rows = WITH_EXPERTS if file.metadata.get(f"{name}.expert_count") and name in WITH_EXPERTS else ROWS
    return str(name), rows[str(name)]


def gguf_tensors(files: Sequence[GgufFile]) -> dict[str, StoredTensor]:
    """Returns the tensors of all files under the names that the model has for them; others keep theirs. files: the
    parts of a model, the first with the metadata."""
    row = gguf_row(files[0])[1]
    names = family_of(row.family).names
    stems = {stem: role for role, stem in STEMS.items()} | dict(row.stems)
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            if name not in ROPE_TENSORS:
                found |= _named(name, tensor, names, stems)
    return found


def _named(
    name: str, tensor: StoredTensor, names: ParameterNames, stems: Mapping[str, Role]
) -> Mapping[str, StoredTensor]:
    """Returns what a tensor holds under the model's names, itself under its own where it has none."""
    layer = LAYER.fullmatch(name)
    prefix = "" if layer is None else names.layer_prefix.format(layer=layer[1])
    stem, _, suffix = (name if layer is None else layer[2]).rpartition(".")
    is_stack, is_shared = stem.endswith(EXPERTS), stem.endswith(SHARED) and stem not in stems
    role = stems.get(stem.removesuffix(EXPERTS).removesuffix(SHARED) if is_stack or is_shared else stem)
    if role is None or role not in names.stems or (role in OUTSIDE) is not (layer is None):
        return {name: tensor}
    if is_stack:
        return {
            names.stored(prefix + names.expert_prefix.format(expert=expert), role, suffix)[0]: one
            for expert, one in enumerate(_each(tensor))
        }
    if role is Role.SHARED_GATE and len(tensor.shape) == 1:  # a matrix of one row, which llama.cpp has as a vector
        tensor = replace(tensor, shape=(1, *tensor.shape))
    return {names.stored(prefix + names.shared_prefix * is_shared, role, suffix)[0]: tensor}


def _each(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """Yields the parts of a tensor that its first dimension counts."""
    count, *shape = tensor.shape
    nbytes = tensor.nbytes // count
    for index in range(count):
        yield replace(tensor, shape=tuple(shape), start=tensor.start + index * nbytes, nbytes=nbytes)
