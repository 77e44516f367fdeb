"""Checks that the vocabulary tables which PEFT saves beside an adapter are the base model's own. Torch-free.

PEFT saves the whole table and loads it in place of the base's, so an adapter with a trained copy, or one of another
model, would compute something else here. Evenly spread rows are compared: models of one shape that were trained
separately differ nearly everywhere. Called by a rank's source lanes and by AdapterChecker.
"""

import json
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from tandem.parallel.stored.headers import GGUF_INDEX, MOST_HEADER_BYTES, find_weights
from tandem.workers.lora.peft.peft_folder import ELEMENT_BYTES, Bytes, PeftAdapter
from tandem.workers.messages.errors import AdapterRefused
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family_rows.families import family_of, parameters_of

SAMPLED_ROWS: Final = 64
ROUNDING: Final = 2.0**-7
"""Copies are saved in the dtype of the training: bf16 keeps 8 bits, and either side may have been rounded."""
SMALLEST: Final = 1e-6
Floats = npt.NDArray[np.float32]


def check_base_tables(adapter: PeftAdapter, model_folder: Path, spec: ArchSpec) -> None:
    """Raises AdapterRefused if a table saved with the adapter is not the checkpoint's."""
    given = [(module, module.base) for module in adapter.facts.modules if module.base is not None]
    if not given:
        return  # as nearly always, and the model's table is dear to make
    table, prefix = parameters_of(spec), family_of(spec.architecture).names.base_prefix
    for module, base in given:
        param = table.head if module.name == table.head_name else table.embedding
        rows = sampled_rows(base.shape[0])
        stored = param.source.names
        theirs = read_rows(model_folder, (*stored, *(name.removeprefix(prefix) for name in stored)), rows)
        copy = adapter.bytes_of(base).reshape(base.shape[0], -1)[rows]
        if not np.allclose(as_floats(copy, base.dtype), theirs, rtol=ROUNDING, atol=SMALLEST):
            raise AdapterRefused(f"tensor {base.name} is not this model's table: the adapter changes its base")


def sampled_rows(count: int) -> list[int]:
    """Returns the indices of up to 64 evenly spread rows, the first and the last included."""
    return sorted(set(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).round().astype(int).tolist()))


def read_rows(folder: Path, names: tuple[str, ...], rows: list[int]) -> Floats:
    """Reads rows of a matrix of a checkpoint, float32 [rows, columns], which has one of these names. AdapterRefused if
    no file has it."""
    for path in find_weights(folder)[0]:
        if path.name == GGUF_INDEX:
            raise AdapterRefused("the model's weights are GGUF, with which the adapter's table is not compared")
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, MOST_HEADER_BYTES)))
            for name in names:
                if name in header:
                    return _read(file, 8 + length, header[name], rows)
    raise AdapterRefused(f"the model's files have no {names[0]} to compare the adapter's table with")


def _read(file: BinaryIO, data_start: int, entry: dict[str, list[int]], rows: list[int]) -> Floats:
    dtype, columns = str(entry["dtype"]), entry["shape"][1]
    if dtype not in ELEMENT_BYTES:
        raise AdapterRefused(f"the model's table is of dtype {dtype}: the adapter's cannot be compared with it")
    row_bytes = columns * ELEMENT_BYTES[dtype]
    found = np.empty((len(rows), row_bytes), np.uint8)
    for place, row in enumerate(rows):
        file.seek(data_start + entry["data_offsets"][0] + row * row_bytes)
        found[place] = np.frombuffer(file.read(row_bytes), np.uint8)
    return as_floats(found, dtype)


def as_floats(rows: Bytes, dtype: str) -> Floats:
    """Converts [rows, bytes] in a dtype of safetensors to float32 [rows, columns]."""
    rows = np.ascontiguousarray(rows)
    if dtype == "BF16":
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return rows.view("<f4" if dtype == "F32" else "<f2").astype(np.float32)
