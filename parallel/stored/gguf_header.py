"""Reads the header of a GGUF file: its metadata and where its tensors stand. Torch-free.

The format (ggml's docs/gguf.md), little endian: "GGUF", version, number of tensors, number of keys; each key with a
type and a value; each tensor with its name, sizes (the fastest first), type and offset; padding; data. A file may be
one of several, NAME-00001-of-00003.gguf: the first has the metadata, each has tensors of its own.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.stored.gguf_kinds import KINDS, GgufKind
from tandem.parallel.stored.headers import FETCH, POINTER, StoredTensor, is_pointer

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
PART: Final = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The formats of values of fixed size, as struct has them, by their types."""
STRING, ARRAY = 8, 9
ALIGNMENT: Final = 32
MOST_SIZES: Final = 4


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A header. metadata: values by key, arrays as lists. tensors: by their names in the file; those of blocks have the
    dtype of their kind, and bytes in place of the inputs of a row."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def gguf_parts(file: Path) -> tuple[Path, ...]:
    """Returns all files of a model of which one is given, in order. SettingsError when some are not there."""
    found = PART.fullmatch(file.name)
    if found is None:
        return (file,)
    count = int(found["count"])
    files = tuple(file.with_name(f"{found['name']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1))
    if missing := [one.name for one in files if not one.is_file()]:
        raise SettingsError(f"{file} is one of {count} files, of which {missing[0]} is not beside it; {FETCH}", "MODEL")
    return files


def read_gguf(file: Path) -> GgufFile:
    """Reads a file's header. SettingsError for one that cannot be read, is no GGUF, or is shorter than it says."""
    try:
        if is_pointer(file):
            raise ValueError(POINTER)
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(file, _Reader(data))
    except OSError as error:
        raise SettingsError(f"cannot read {file}: {error.strerror}", "MODEL") from error
    except (struct.error, IndexError) as error:
        raise SettingsError(f"{file} is cut off within its header; {FETCH}", "MODEL") from error
    except ValueError as error:
        raise SettingsError(f"{file} is not a GGUF file that is read: {error}", "MODEL") from error


class _Reader:
    """The values of a header, one behind another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.place = 0
        self.size = len(data)

    def bytes(self, count: int) -> bytes:
        found = self._data[self.place : self.place + count]
        if len(found) != count:
            raise IndexError(count)
        self.place += count
        return found

    def numbers(self, kind: str, count: int = 1) -> tuple[Any, ...]:
        form = f"<{count}{kind}"
        found = struct.unpack_from(form, self._data, self.place)
        self.place += struct.calcsize(form)
        return found

    def number(self, kind: str) -> Any:
        return self.numbers(kind)[0]

    def text(self) -> str:
        return self.bytes(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            of, count = self.numbers("I")[0], self.number("Q")
            if count > self.size:
                raise IndexError(count)
            return list(self.numbers(NUMBERS[of], count)) if of in NUMBERS else [self.value(of) for _ in range(count)]
        if kind not in NUMBERS:
            raise ValueError(f"its metadata has a value of type {kind}, which is unknown")
        return self.number(NUMBERS[kind])


def _read(file: Path, reader: _Reader) -> GgufFile:
    if reader.bytes(4) != MAGIC:
        raise ValueError("it does not begin as one")
    version = reader.number("I")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, want one of {VERSIONS}")
    num_tensors, num_keys = reader.numbers("Q", 2)
    metadata = {}
    for _ in range(num_keys):
        key = reader.text()
        metadata[key] = reader.value(reader.number("I"))
    entries = list(_entries(reader, num_tensors))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"its alignment is {alignment!r}")
    data = -(-reader.place // alignment) * alignment
    tensors = {name: _tensor(file, name, kind, sizes, data + offset) for name, sizes, kind, offset in entries}
    end = max((tensor.start + tensor.nbytes for tensor in tensors.values()), default=0)
    if end > reader.size:
        raise SettingsError(
            f"{file} is cut off: it has {reader.size} bytes, and its tensors end at {end}; {FETCH}", "MODEL"
        )
    return GgufFile(file, metadata, tensors)


def _entries(reader: _Reader, count: int) -> Iterator[tuple[str, tuple[int, ...], GgufKind, int]]:
    """Yields name, sizes (rows first), kind and offset of each tensor."""
    for _ in range(count):
        name, dims = reader.text(), reader.number("I")
        if dims > MOST_SIZES:
            raise ValueError(f"tensor {name} has {dims} sizes")
        sizes = reader.numbers("Q", dims)[::-1]
        number, offset = reader.number("I"), reader.number("Q")
        if number not in KINDS:
            raise ValueError(f"tensor {name} is of type {number}, which is unknown")
        yield name, sizes, KINDS[number], offset


def _tensor(file: Path, name: str, kind: GgufKind, sizes: tuple[int, ...], start: int) -> StoredTensor:
    row = sizes[-1] if sizes else 1
    if row % kind.elements:
        raise ValueError(f"tensor {name} of {kind.name} has rows of {row}, which are no blocks of {kind.elements}")
    row_bytes = row // kind.elements * kind.bytes
    nbytes = math.prod(sizes[:-1]) * row_bytes
    shape = sizes if kind.elements == 1 else (*sizes[:-1], row_bytes)
    return StoredTensor(file, name, kind.name, shape, start, nbytes)
