"""Device memory for adapters on this rank: a slab of equal pages, and for each section the tables that say where the
rows of each slot's adapter are.

Written by the place mover's thread, read by the steps (sites.py) beside it: a slot or page that a plan in flight names
is never written, which the coordinator sees to. P pages, E elements of a page, S sections, R the highest rank.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from workers.kernels.lora import SectionTables
from workers.lora.host_copy import HostCopy
from workers.lora.layout import ShardShape
from workers.rank.kv_tensors import zeros


class AdapterSlab:
    """`slab_PE` in the model's dtype; `tables[s]` and `slots_of[s]` (the slots whose adapter changes it) by section.
    `changes` counts what was put.

    `memory_PE`: the slab, and where `with_identity` the identity of [R, R] behind it, from element `identity_start` on.
    """

    def __init__(
        self,
        shape: ShardShape,
        num_pages: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        with_identity: bool = False,
    ) -> None:
        self.shape = shape
        self.identity_start = num_pages * shape.page_elements
        size = shape.max_rank**2 if with_identity else 0
        all_pages = num_pages + -(-size // shape.page_elements)
        self.memory_PE = zeros((all_pages, shape.page_elements), dtype, device)
        self.slab_PE = self.memory_PE[:num_pages]
        self.memory_PE.view(-1)[self.identity_start :][: size : shape.max_rank + 1] = 1
        self.slots_of: list[set[int]] = [set() for _ in shape.parts]
        self.changes = 0
        self._device = device
        self._num_slots = 0
        self.tables: list[SectionTables] = []
        self._rows_2SLR: torch.Tensor
        self._ranks_SL: torch.Tensor
        self._scales_SL: torch.Tensor
        self._outgrown: list[list[SectionTables]] = []
        self._make_tables(num_slots)

    @property
    def page_bytes(self) -> int:
        return self.shape.page_elements * self.slab_PE.dtype.itemsize

    def put(self, copy: HostCopy, pages: Sequence[int], slot: int) -> None:
        """Copies the adapter to `pages` (as many of them as it needs) and makes it `slot`. On CUDA: given out to the
        current stream, done when that is."""
        assert len(pages) >= copy.num_pages and slot >= 0, (len(pages), copy.num_pages, slot)
        if slot >= self._num_slots:
            self._make_tables(max(slot + 1, 2 * self._num_slots))
        self._copy_pages(copy, pages)
        starts_2SR = copy.packing.starts(pages, self.shape.page_elements)
        self._rows_2SLR[:, :, slot].copy_(torch.from_numpy(starts_2SR))
        self._ranks_SL[:, slot].copy_(torch.from_numpy(copy.ranks_S))
        self._scales_SL[:, slot].copy_(torch.from_numpy(copy.scales_S))
        self.changes += 1
        for rank, slots in zip(copy.ranks_S.tolist(), self.slots_of, strict=True):
            (slots.add if rank else slots.discard)(slot)

    def _copy_pages(self, copy: HostCopy, pages: Sequence[int]) -> None:
        """By runs of neighbours. On CPU as bytes, on this thread alone: torch would take the cores of a step."""
        target, source = self.slab_PE, copy.pages_NE
        if self._device.type != "cpu":
            for first, page, count in _runs(pages[: copy.num_pages]):
                target[page : page + count].copy_(source[first : first + count], non_blocking=True)
            return
        to, came_from = (tensor.view(torch.uint8).numpy() for tensor in (target, source))
        for first, page, count in _runs(pages[: copy.num_pages]):
            np.copyto(to[page : page + count], came_from[first : first + count])

    def _make_tables(self, num_slots: int) -> None:
        """Larger tables with what the present ones hold; a step that reads those meanwhile reads the same."""
        shape, held = self.shape, self._num_slots
        sections = len(shape.parts)
        rows_2SLR = torch.full((2, sections, num_slots, shape.max_rank), -1, dtype=torch.int64, device=self._device)
        ranks_SL = torch.zeros(sections, num_slots, dtype=torch.int32, device=self._device)
        scales_SL = torch.zeros(sections, num_slots, dtype=torch.float32, device=self._device)
        if held:
            self._outgrown.append(self.tables)  # a step on the device may still read them
            rows_2SLR[:, :, :held] = self._rows_2SLR
            ranks_SL[:, :held], scales_SL[:, :held] = self._ranks_SL, self._scales_SL
        self._rows_2SLR, self._ranks_SL, self._scales_SL = rows_2SLR, ranks_SL, scales_SL
        self._num_slots = num_slots
        self.tables = [
            SectionTables(
                a_rows=rows_2SLR[0, section],
                b_rows=rows_2SLR[1, section],
                ranks=ranks_SL[section],
                scales=scales_SL[section],
                inputs=part.inputs.length,
                outputs=part.outputs.length,
                start=part.column,
            )
            for section, part in enumerate(shape.parts)
        ]


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in `pages`, first page, pages) of each maximal run of consecutive ones."""
    first = 0
    for place in range(1, len(pages) + 1):
        if place == len(pages) or pages[place] != pages[place - 1] + 1:
            yield first, pages[first], place - first
            first = place
