"""The number of pages that adapters take on a rank, on the device and in host memory. Torch-free.

workers/lora allocates pages by it; `tandem plan` and the launcher's checks predict them. A row is a row of A
([rank, inputs]) or of B transposed ([rank, outputs]), as this rank holds it, and lies inside one page. Lengths and
strides are in elements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from tandem.configs.errors import SettingsError
from tandem.configs.schema import LoraSettings
from tandem.parallel.mesh import Mesh, layer_range
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family_rows.families import parameters_of

if TYPE_CHECKING:  # the launcher starts without numpy
    import numpy as np
    import numpy.typing as npt

Elements = TypeVar("Elements", int, "npt.NDArray[np.int64]")
ALIGNED_ELEMENTS: Final = 16
"""Rows begin at multiples of it, so that kernels load aligned vectors."""
ROWS_PER_PAGE: Final = 4
"""Rows of the greatest length in a page. More waste the end of an adapter's last page, fewer leave gaps among rows of
different lengths."""
FLAG: Final = "--lora-memory-bytes"


class Run(NamedTuple):
    """Consecutive rows of one stride in a page. offset: of the first, in elements."""

    stride: int
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """The memory for adapters on one rank. num_pages: on the device. copy_bytes: of the host copy of the largest
    adapter that it can serve. host_bytes: of --max-cpu-loras such copies."""

    page_bytes: int = 0
    num_pages: int = 0
    copy_bytes: int = 0
    host_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def adapter_room(lora: LoraSettings, spec: ArchSpec, mesh: Mesh, element_bytes: int) -> AdapterRoom:
    """Computes the memory for adapters of the rank at `mesh`; all 0 without --enable-lora. All stages have as many
    pages as the fullest stage needs. SettingsError (--lora-memory-bytes) when that is less than a page."""
    if not lora.enable_lora:
        return AdapterRoom()
    page, most_pages = fullest_stage(spec, mesh.tp_size, mesh.pp_size, lora.max_lora_rank)
    num_pages = device_pages(lora, page * element_bytes, most_pages)
    own = _stage_lengths(spec, mesh.tp_size, mesh.pp_rank, mesh.pp_size) + _table_lengths(spec, mesh, page)
    copy = min(num_pages, count_pages(own, lora.max_lora_rank, page)) * page * element_bytes
    return AdapterRoom(page * element_bytes, num_pages, copy, lora.max_cpu_loras * copy)


def fullest_stage(spec: ArchSpec, tp_size: int, pp_size: int, max_rank: int) -> tuple[int, int]:
    """Returns the elements of a page, and how many pages an adapter of max_rank on every linear layer takes on a rank
    of the stage where it takes the most."""
    stages = [_stage_lengths(spec, tp_size, stage, pp_size) for stage in range(pp_size)]
    page = page_elements([length for stage in stages for length in stage])
    return page, max(count_pages(stage, max_rank, page) for stage in stages)


def device_pages(lora: LoraSettings, page_bytes: int, most_pages: int) -> int:
    """The number of device pages: of --lora-memory-bytes, else of max_loras adapters of most_pages each. most_pages: of
    an adapter of the highest rank on every linear layer. SettingsError when the flag is less than one page."""
    if lora.memory_bytes is None:
        return lora.max_loras * most_pages
    if lora.memory_bytes < page_bytes:
        raise SettingsError(f"{FLAG} {lora.memory_bytes} is less than one page of {page_bytes} bytes", FLAG)
    return lora.memory_bytes // page_bytes


# ---- rows in pages ----


def row_stride(length: Elements) -> Elements:
    """Elements from the start of a row to the start of the next, for a row, or an array of rows, of `length`
    elements."""
    return -(-length // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def page_elements(lengths: Sequence[int]) -> int:
    """Elements of a page: ROWS_PER_PAGE rows of the greatest length."""
    return ROWS_PER_PAGE * row_stride(max(lengths))


def filled(rows: Mapping[int, int], page: int) -> Iterator[list[Run]]:
    """Yields the runs of page after page, filled with the longest remaining rows that fit (first fit decreasing). rows:
    number of rows by stride. page: its elements."""
    left = dict(sorted(rows.items(), reverse=True))
    while any(left.values()):
        offset, runs = 0, []
        for stride, count in left.items():
            taken = min(count, (page - offset) // stride)
            left[stride] -= taken
            runs.append(Run(stride, offset, taken))
            offset += taken * stride
        yield runs


def count_pages(lengths: Sequence[int], rank: int, page: int) -> int:
    """The number of pages of an adapter with `rank` rows of each length."""
    rows: Counter[int] = Counter()
    for length, count in Counter(lengths).items():
        rows[row_stride(length)] += rank * count
    return sum(1 for _ in filled(rows, page))


def _stage_lengths(spec: ArchSpec, tp_size: int, stage: int, num_stages: int) -> list[int]:
    """Lengths of the rows of A and B of all linears of a stage's layers, on one rank."""
    layers = parameters_of(spec).layers
    return [
        length
        for index in layer_range(spec.num_layers, stage, num_stages)
        for param in layers[index].adaptable
        for length in reversed(param.local_shape(Mesh(tp_size)))
    ]


def _table_lengths(spec: ArchSpec, mesh: Mesh, page: int) -> list[int]:
    """Lengths of the rows of A and B of the embedding and the head, on the ranks that have them. The longer side is
    split in pieces of a page, each with the shorter side (workers/lora/device/layout.py, in_pieces)."""
    tables = (mesh.pp_rank == 0) + (mesh.pp_rank == mesh.pp_size - 1)
    short, long = sorted((-(-spec.vocab_size // mesh.tp_size), spec.hidden_size))
    pieces = [min(page, long - first) for first in range(0, long, page)]
    return tables * [length for piece in pieces for length in (piece, short)]
