"""Layout of an adapter's rows in its device pages: arithmetic on this rank's shapes, no bytes.

Used by host_copy.py and slab.py. A row is one of A ([rank, inputs]) or of B transposed ([rank, outputs]), this rank's
part of it; each lies whole inside one page, so memory follows an adapter's true rank, in steps of a page (S-LoRA, Sheng
et al. 2023). How pages fill is workers/planning/adapter_room.py's. S projections (checkpoint
linears) of this rank, R the highest rank accepted; the axis of 2 is A, then B transposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tandem.parallel.linear import LinearPart
from tandem.parallel.params import Span
from tandem.workers.planning import adapter_room
from tandem.workers.planning.adapter_room import count_pages, filled, row_stride

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ShardShape:
    """The parts of a rank that adapters change: its projections in the order of the layers, and the page that fits
    their rows.

    lengths_2S: elements of a projection's rows.
    """

    parts: tuple[LinearPart, ...]
    max_rank: int
    lengths_2S: Ints
    page_elements: int

    @classmethod
    def of(cls, parts: Sequence[LinearPart], max_rank: int, page_elements: int | None = None) -> "ShardShape":
        """page_elements None: a page that fits several of the longest rows."""
        lengths = np.array([[part.inputs.length for part in parts], [part.outputs.length for part in parts]], np.int64)
        longest = int(row_stride(lengths).max())
        assert page_elements is None or longest <= page_elements, (longest, page_elements)
        return cls(tuple(parts), max_rank, lengths, page_elements or adapter_room.page_elements([longest]))

    @property
    def most_pages(self) -> int:
        """Elements of an adapter of max_rank on every projection."""
        return count_pages(self.lengths_2S.reshape(-1).tolist(), self.max_rank, self.page_elements)


@dataclass(frozen=True, slots=True)
class Packing:
    """pages_2SR, offsets_2SR: in which of the adapter's own pages row k lies, and at which element of it; -1 beyond the
    projection's rank."""

    num_pages: int
    pages_2SR: Ints
    offsets_2SR: Ints

    def starts(self, pages: Sequence[int], page_elements: int) -> Ints:
        """[2, S, R]: where each row begins in the flat slab when `pages` are the adapter's; -1 beyond the rank."""
        if self.num_pages == 0:
            return np.full_like(self.pages_2SR, -1)
        first_of_page = np.asarray(pages[: self.num_pages], np.int64) * page_elements
        return np.where(self.pages_2SR < 0, -1, first_of_page[self.pages_2SR] + self.offsets_2SR)


def in_pieces(part: LinearPart, page_elements: int) -> list[LinearPart]:
    """Splits a vocabulary table by its longer side into projections whose rows fit a page."""
    by_inputs = part.inputs.length > part.outputs.length
    whole = part.inputs if by_inputs else part.outputs
    pieces = []
    for first in range(0, whole.length, page_elements):
        piece = Span(whole.total, whole.start + first, min(page_elements, whole.length - first))
        if by_inputs:
            pieces.append(replace(part, inputs=piece))
        else:
            pieces.append(replace(part, outputs=piece, column=first))
    return pieces


def pack(shape: ShardShape, ranks_S: Ints) -> Packing:
    """Gives every row its place."""
    held_2SR = np.broadcast_to(
        np.arange(shape.max_rank) < ranks_S[:, None], (2, len(shape.parts), shape.max_rank)
    ).reshape(-1)
    strides = np.repeat(row_stride(shape.lengths_2S).reshape(-1), shape.max_rank)
    lengths, counts = np.unique(strides[held_2SR], return_counts=True)
    rows: dict[int, int] = dict(zip(lengths.tolist(), counts.tolist(), strict=True))
    places: dict[int, list[tuple[int, int]]] = {stride: [] for stride in rows}
    num_pages = 0
    for runs in filled(rows, shape.page_elements):
        for stride, offset, count in runs:
            places[stride] += [(num_pages, offset + row * stride) for row in range(count)]
        num_pages += 1
    flat = np.full((len(strides), 2), -1, np.int64)
    for stride, found in places.items():
        flat[held_2SR & (strides == stride)] = found
    pages, offsets = flat.T.reshape(2, 2, len(shape.parts), shape.max_rank)
    return Packing(num_pages, pages, offsets)
