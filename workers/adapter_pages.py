"""How many pages adapters take on a rank, from lengths of rows alone: on the device and in host memory. Torch-free.

Asked by workers/lora, which lays rows out and allocates pages so, and by `tandem plan` and the launcher's checks, which
foretell it. A row is one of A ([rank, inputs]) or of B transposed ([rank, outputs]), this rank's part of it; it lies
whole inside one page. Lengths and strides are in elements.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from configs.errors import SettingsError
from configs.schema import LoraSettings
from parallel.mesh import Mesh, layer_range
from workers.models.sizes import layer_linears
from workers.models.spec import ArchSpec

ALIGNED_ELEMENTS: Final = 16
"""A row begins at a multiple, so that vectors of it are loaded whole."""
ROWS_PER_PAGE: Final = 4
"""Of the longest row. More waste at the end of an adapter's last page, fewer leave gaps among rows of many lengths."""
FLAG: Final = "--lora-memory-bytes"


class Run(NamedTuple):
    """Rows of one stride, one behind the other from an element of a page."""

    stride: int
    offset: int
    rows: int


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Of one rank. num_pages: of its device; copy_bytes: of the largest adapter that it can serve, as a host copy;
    host_bytes: of --max-cpu-loras of them."""

    page_bytes: int = 0
    num_pages: int = 0
    copy_bytes: int = 0
    host_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def adapter_room(lora: LoraSettings, spec: ArchSpec, mesh: Mesh, element_bytes: int) -> AdapterRoom:
    """What the rank at `mesh` will have, nothing without --enable-lora. Pages are as many on all stages: what the one
    with the most layers needs. SettingsError (--lora-memory-bytes) when that is less than a page."""
    if not lora.enable_lora:
        return AdapterRoom()
    layer = _layer_lengths(spec, mesh.tp_size)
    page = page_elements(layer)
    most_layers = -(-spec.num_layers // mesh.pp_size)
    num_pages = device_pages(lora, page * element_bytes, count_pages(layer * most_layers, lora.max_lora_rank, page))
    own = layer * len(layer_range(spec.num_layers, mesh.pp_rank, mesh.pp_size)) + _table_lengths(spec, mesh, page)
    copy = min(num_pages, count_pages(own, lora.max_lora_rank, page)) * page * element_bytes
    return AdapterRoom(page * element_bytes, num_pages, copy, lora.max_cpu_loras * copy)


def device_pages(lora: LoraSettings, page_bytes: int, most_pages: int) -> int:
    """As asked for, else those of max_loras adapters; most_pages: of one of the highest rank on every linear."""
    if lora.memory_bytes is None:
        return lora.max_loras * most_pages
    if lora.memory_bytes < page_bytes:
        raise SettingsError(f"{FLAG} {lora.memory_bytes} is less than one page of {page_bytes} bytes", FLAG)
    return lora.memory_bytes // page_bytes


# ---- rows in pages ----


def row_stride(length: int) -> int:
    """Elements from the beginning of one row to that of the next."""
    return -(-length // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def page_elements(lengths: Sequence[int]) -> int:
    """A page fits ROWS_PER_PAGE of the longest rows."""
    return ROWS_PER_PAGE * row_stride(max(lengths))


def filled(rows: Mapping[int, int], page: int) -> Iterator[list[Run]]:
    """Page after page, each with the longest rows that are left and fit (first fit decreasing). rows: how many, by
    stride."""
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
    """Of an adapter with `rank` rows of each length."""
    rows: Counter[int] = Counter()
    for length, count in Counter(lengths).items():
        rows[row_stride(length)] += rank * count
    return sum(1 for _ in filled(rows, page))


def _layer_lengths(spec: ArchSpec, tp_size: int) -> list[int]:
    """Of the rows of A and B of a layer's linears on one rank."""
    return [
        length
        for x in layer_linears(spec, tp_size)
        for length in (x.inputs // tp_size if x.by_rows else x.inputs, x.local_outputs)
    ]


def _table_lengths(spec: ArchSpec, mesh: Mesh, page: int) -> list[int]:
    """Of the embedding and the head where the rank has them: the longer side is cut in pieces of a page, the other is
    in every piece (workers/lora/layout.py, in_pieces)."""
    tables = (mesh.pp_rank == 0) + (mesh.pp_rank == mesh.pp_size - 1)
    short, long = sorted((-(-spec.vocab_size // mesh.tp_size), spec.hidden_size))
    pieces = [min(page, long - first) for first in range(0, long, page)]
    return tables * [length for piece in pieces for length in (piece, short)]
