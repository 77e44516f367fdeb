"""Compares two tensors of a checkpoint's files, piece by piece, without loading them. Torch-free.

Called where a model's settings are read, by every process that reads them (workers/models/spec/config/stored_head.py),
so what was found is kept for as long as the files stay as they are.
"""

from functools import lru_cache
from typing import Any, BinaryIO, Final

from tandem.configs.errors import SettingsError
from tandem.parallel.params import FLOATS
from tandem.parallel.stored.headers import STORED_BYTES, StoredTensor

PIECE_ELEMENTS: Final = 2**21
"""Elements that are compared at a time: some MiB of each tensor are in memory, not the tensors."""


def equal_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Returns whether two tensors have the same shape and numbers, in whatever dtypes. SettingsError, with the file,
    when one cannot be read. Ends at the first difference."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= {*FLOATS}:
        return False
    try:
        return _equal(one, other, _state(one), _state(other))
    except OSError as error:
        raise SettingsError(f"cannot read {error.filename or one.file}: {error.strerror}", "MODEL") from error


def _state(tensor: StoredTensor) -> tuple[int, int, int]:
    """Returns what differs when a file has been replaced or written."""
    found = tensor.file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@lru_cache(maxsize=16)
def _equal(one: StoredTensor, other: StoredTensor, *states: tuple[int, int, int]) -> bool:
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.nbytes // STORED_BYTES[one.dtype]
        while left:
            taken = min(left, PIECE_ELEMENTS)
            ours, theirs = (
                _read(file, taken * STORED_BYTES[tensor.dtype]) for file, tensor in ((first, one), (second, other))
            )
            is_same = one.dtype == other.dtype and ours == theirs
            if not is_same and not bool((_floats(ours, one.dtype) == _floats(theirs, other.dtype)).all()):
                return False
            left -= taken
    return True


def _read(file: BinaryIO, size: int) -> bytes:
    """Returns the next `size` bytes; OSError where the file ends before."""
    found = file.read(size)
    if len(found) != size:
        raise OSError(5, "the file ends too early", file.name)
    return found


def _floats(data: bytes, dtype: str) -> Any:
    """Returns the numbers, exactly, as an array of float32."""
    import numpy as np  # not where bytes are equal, as they mostly are

    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, "<f4" if dtype == "F32" else "<f2").astype(np.float32)
