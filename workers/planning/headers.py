"""Reads the contents of a checkpoint folder from the headers of its safetensors files, without any tensor. Torch-free.

Used by `tandem plan`, and for the base model's tables beside an adapter. A header is 8 bytes of length (little endian),
then JSON: name -> dtype, shape, data_offsets.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.configs.errors import SettingsError

MOST_HEADER_BYTES = 100_000_000
"""safetensors' own limit."""


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The number of files, bytes of tensors by dtype (in safetensors' spelling), and elements by tensor name."""

    num_files: int
    bytes_by_dtype: dict[str, int]
    elements: dict[str, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())


def read_checkpoint_facts(folder: Path) -> CheckpointFacts | None:
    """Returns the facts of all .safetensors files in the folder, None when there are none. SettingsError for a broken
    one."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    sizes: Counter[str] = Counter()
    elements: dict[str, int] = {}
    for file in files:
        for name, dtype, shape, size in _tensors(file):
            sizes[dtype] += size
            elements[name] = _product(shape)
    return CheckpointFacts(len(files), dict(sizes), elements)


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int], int]]:
    try:
        for name, entry in _header(file).items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, entry["dtype"], entry["shape"], end - start
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{file} is not a safetensors file: {error}", "MODEL") from error


def _header(file: Path) -> Any:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        return json.loads(stream.read(length))


def _product(shape: list[int]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
