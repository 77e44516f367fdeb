"""Slices of parameters: their places in the files of a checkpoint, and the reading of their bytes. Torch-free.

A slice is read as blocks: rows of a stored matrix, or a range of bytes of each. Only these bytes are read, but for rows
whose part is shorter than a page, where the disk would read the rest too.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tandem.parallel.params import Param
from tandem.parallel.stored.headers import STORED_BYTES, StoredTensor

PAGE_BYTES: Final = 4096
CHUNK_BYTES: Final = 4 * 2**20
"""Bytes that are read at a time where parts of rows are cut out of them."""


@dataclass(frozen=True, slots=True)
class TensorBlock:
    """The bytes [left, left + width) of each of num_rows rows. start: byte of the file of the first row, row_bytes:
    from one row to the next."""

    tensor: StoredTensor
    start: int
    row_bytes: int
    num_rows: int
    left: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.width

    def parts(self, most_bytes: int) -> Iterator["TensorBlock"]:
        """Yields the block in parts of about most_bytes, in order."""
        step = max(1, most_bytes // max(1, self.width))
        for first in range(0, self.num_rows, step):
            rows = min(step, self.num_rows - first)
            yield replace(self, start=self.start + first * self.row_bytes, num_rows=rows)

    def read(self, descriptor: int, target: memoryview) -> None:
        """Reads the block's bytes into `target`, one row's behind another's. OSError; EOFError where the file ends too
        soon."""
        if self.width == self.row_bytes:
            _read(descriptor, target, self.start)
        elif self.width >= PAGE_BYTES:
            for row in range(self.num_rows):
                part = target[row * self.width : (row + 1) * self.width]
                _read(descriptor, part, self.start + row * self.row_bytes + self.left)
        else:
            self._read_and_cut(descriptor, target)

    def _read_and_cut(self, descriptor: int, target: memoryview) -> None:
        step = max(1, CHUNK_BYTES // self.row_bytes)
        rows = np.empty((min(step, self.num_rows), self.row_bytes), np.uint8)
        wanted = np.frombuffer(target, np.uint8).reshape(self.num_rows, self.width)
        for first in range(0, self.num_rows, step):
            taken = rows[: min(step, self.num_rows - first)]
            _read(descriptor, taken.data.cast("B"), self.start + first * self.row_bytes)
            wanted[first : first + step] = taken[:, self.left : self.left + self.width]


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter's slice as it is read."""

    dtype: str
    blocks: tuple[TensorBlock, ...]
    # of the blocks' bytes as one matrix [rows, columns] or vector; with `transposed` [columns, rows]
    shape: tuple[int, ...]
    transposed: bool = False
    # (first, rows) of the rows that are taken of it; None: all, in order
    pieces: tuple[tuple[int, int], ...] | None = None
    add: float = 0.0  # as Source.add

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def is_plain(self) -> bool:
        """True if the bytes are those of the parameter's slice, as they are."""
        return not self.transposed and self.pieces is None and not self.add


def slice_of(param: Param, stored: tuple[StoredTensor, ...], dim: int, start: int, length: int) -> Slice:
    """Returns the slice [start, start + length) along `dim` of a parameter. stored: the tensor in which it stands, or
    those that are joined to it."""
    source = param.source
    if source.whole:
        count = math.prod(stored[0].shape)
        return Slice(stored[0].dtype, (_block(stored[0], None, (0, count), (0, 1), flat=True),), (count,))
    ranges = [(0, size) for size in param.shape]
    ranges[dim] = start, length
    pieces = tuple(source.stored(*ranges[0]))
    low, high = min(first for first, _ in pieces), max(first + count for first, count in pieces)
    columns = ranges[1] if len(param.shape) > 1 else (0, 1)
    bounding = source.joined or source.transposed or bool(source.order) or source.run == 1
    if source.joined:
        low, high = 0, param.shape[0]
        blocks = tuple(_block(tensor, None, (0, math.prod(tensor.shape)), (0, 1), flat=True) for tensor in stored)
    else:
        flat = len(param.shape) == 1 and len(stored[0].shape) - (source.index is not None) > 1
        spans = ((low, high - low),) if bounding else pieces
        blocks = tuple(
            _block(stored[0], source.index, *((columns, span) if source.transposed else (span, columns)), flat=flat)
            for span in spans
        )
    rows = high - low if bounding else sum(count for _, count in pieces)
    shape = (rows,) if len(param.shape) == 1 else (rows, columns[1])
    taken = tuple((first - low, count) for first, count in pieces)
    return Slice(
        stored[0].dtype,
        blocks,
        shape[::-1] if source.transposed else shape,
        transposed=source.transposed,
        pieces=taken if bounding and taken != ((0, rows),) else None,
        add=source.add,
    )


def _block(
    tensor: StoredTensor, index: int | None, rows: tuple[int, int], columns: tuple[int, int], *, flat: bool
) -> TensorBlock:
    """Returns rows and columns, each (first, count), of a stored matrix, or of the one at `index` of a stack. flat: all
    its elements are rows of one."""
    item = STORED_BYTES[tensor.dtype]
    shape = tensor.shape if index is None else tensor.shape[1:]
    start = tensor.start + (0 if index is None else index * math.prod(shape) * item)
    row_bytes = item if flat else item * math.prod(shape[1:])
    return TensorBlock(tensor, start + rows[0] * row_bytes, row_bytes, rows[1], columns[0] * item, columns[1] * item)


def _read(descriptor: int, target: memoryview, start: int) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], start + done)
        if not count:
            raise EOFError
        done += count
