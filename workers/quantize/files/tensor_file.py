"""Writes safetensors files piece by piece: a tensor's bytes come from wherever they are, and are not all in memory.

A file is complete, and on the disk, before it has its name.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.parallel.stored.headers import StoredTensor

PIECE_BYTES = 2**24
DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to write. pieces: makes its bytes, in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[], Iterable[memoryview]]


def of_memory(name: str, tensor: torch.Tensor) -> WrittenTensor:
    """Returns a tensor that is in memory."""
    held = tensor.contiguous()

    def pieces() -> Iterable[memoryview]:
        yield memoryview(held.view(-1).view(torch.uint8).numpy())

    return WrittenTensor(name, DTYPE_NAMES[held.dtype], tuple(held.shape), held.nbytes, pieces)


def of_file(name: str, tensor: StoredTensor) -> WrittenTensor:
    """Returns a tensor that another file has, byte by byte."""

    def pieces() -> Iterable[memoryview]:
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.start)
            left = tensor.nbytes
            while left:
                data = stream.read(min(PIECE_BYTES, left))
                if not data:
                    raise OSError(f"{tensor.file} has become shorter")
                left -= len(data)
                yield memoryview(data)

    return WrittenTensor(name, tensor.dtype, tensor.shape, tensor.nbytes, pieces)


def write_tensors(file: Path, tensors: Sequence[WrittenTensor]) -> None:
    """Writes a safetensors file, durably. OSError."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for one in tensors:
        offsets = [start, start + one.nbytes]
        entries[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": offsets}
        start += one.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    new = file.with_name(f"{file.name}.new")
    with new.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for one in tensors:
            for piece in one.pieces():
                stream.write(piece)
        stream.flush()
        keep(stream.fileno(), new, file)


def write_text(file: Path, text: str) -> None:
    """Writes a small file, durably. OSError."""
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        keep(stream.fileno(), new, file)


def keep(descriptor: int, new: Path, file: Path) -> None:
    """Gives a written file its name once its bytes are on the disk."""
    os.fsync(descriptor)
    new.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
