"""Device memory for adapters on this rank: a slab of equal pages, and for each projection the tables that say where the
rows of each slot's adapter are.

Written by the place lane's thread, read by the steps (lora_layers.py) beside it: a slot or page that a plan in flight
names is never written, which the coordinator sees to. P pages, E elements of a page, S projections, R the highest rank.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from tandem.workers.kernels.lora_ops import ProjectionTables
from tandem.workers.lora.device.host_copy import HostCopy
from tandem.workers.lora.device.layout import ShardShape
from tandem.workers.planning.adapter_room import row_stride
from tandem.workers.platforms.base import Platform

ALIGNED_SLOTS: Final = 4
"""Tables have a multiple of it, so that each projection's begin at multiples of 16 bytes and kernels are compiled
once."""


class AdapterSlab:
    """`slab_PE` in the model's dtype; `tables[s]` and `slots_of[s]` (the slots whose adapter changes it) by projection.
    `changes` counts what was put. There is a slot for every page, as even the smallest adapter takes one.

    `memory_PE`: the slab, and where `with_identity` the identity of [R, R] behind it, from element `identity_start` on,
    a row at each `identity_stride`.
    """

    def __init__(
        self,
        shape: ShardShape,
        num_pages: int,
        dtype: torch.dtype,
        platform: Platform,
        *,
        with_identity: bool = False,
    ) -> None:
        self.shape = shape
        self.identity_start = num_pages * shape.page_elements
        self.identity_stride = row_stride(shape.max_rank)
        size = shape.max_rank * self.identity_stride if with_identity else 0
        all_pages = num_pages + -(-size // shape.page_elements)
        self.memory_PE = platform.zeros((all_pages, shape.page_elements), dtype)
        self.slab_PE = self.memory_PE[:num_pages]
        self.memory_PE.view(-1)[self.identity_start :][: size : self.identity_stride + 1] = 1
        self.slots_of: list[set[int]] = [set() for _ in shape.parts]
        self.changes = 0
        self._copy_from_host = platform.copy_pages
        self._num_slots = -(-num_pages // ALIGNED_SLOTS) * ALIGNED_SLOTS
        projections, device = len(shape.parts), platform.device
        places = (2, projections, self._num_slots, shape.max_rank)
        self._rows_2SLR = torch.full(places, -1, dtype=torch.int64, device=device)
        self._ranks_SL = torch.zeros(places[1:3], dtype=torch.int32, device=device)
        self._scales_SL = torch.zeros(places[1:3], dtype=torch.float32, device=device)
        self.tables = [
            ProjectionTables(
                a_rows=self._rows_2SLR[0, projection],
                b_rows=self._rows_2SLR[1, projection],
                ranks=self._ranks_SL[projection],
                scales=self._scales_SL[projection],
                inputs=part.inputs.length,
                outputs=part.outputs.length,
                start=part.column,
            )
            for projection, part in enumerate(shape.parts)
        ]
        platform.accelerator.synchronize()  # the lane writes on a stream of its own

    @property
    def page_bytes(self) -> int:
        return self.shape.page_elements * self.slab_PE.dtype.itemsize

    def put(self, copy: HostCopy, pages: Sequence[int], slot: int) -> None:
        """Copies the adapter to `pages` (as many of them as it needs) and makes it `slot`. Given out to the
        current stream, done when that is."""
        assert len(pages) >= copy.num_pages and 0 <= slot < self._num_slots, (len(pages), copy.num_pages, slot)
        self._copy_pages(copy, pages)
        starts_2SR = copy.packing.starts(pages, self.shape.page_elements)
        self._rows_2SLR[:, :, slot].copy_(torch.from_numpy(starts_2SR))
        self._ranks_SL[:, slot].copy_(torch.from_numpy(copy.ranks_S))
        self._scales_SL[:, slot].copy_(torch.from_numpy(copy.scales_S))
        self.changes += 1
        for rank, slots in zip(copy.ranks_S.tolist(), self.slots_of, strict=True):
            (slots.add if rank else slots.discard)(slot)

    def _copy_pages(self, copy: HostCopy, pages: Sequence[int]) -> None:
        """Fill by runs of neighbours."""
        target, source = self.slab_PE, copy.pages_NE
        for first, page, count in _runs(pages[: copy.num_pages]):
            self._copy_from_host(target[page : page + count], source[first : first + count])


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in `pages`, first page, pages) of each maximal run of consecutive ones."""
    first = 0
    for place in range(1, len(pages) + 1):
        if place == len(pages) or pages[place] != pages[place - 1] + 1:
            yield first, pages[first], place - first
            first = place
