"""The places in the decoder where adapters add something: one Delta for each linear layer of this rank.

Attached by memory.py when --enable-lora is on; told of each step by the decoder. A step without an adapter, and a layer
that no adapter of the step changes, cost a comparison.
"""

from collections.abc import Iterable

import torch

from parallel.linear import AdaptableLinear
from workers.kernels.lora import AdapterRows, LoraOps, SectionTables
from workers.lora.slab import AdapterSlab
from workers.models.forward_batch import ForwardBatch

WARM_UP_TOKENS = (1, 64)


class AdapterSites:
    """The Adapters of a decoder. `rows`, `slots`: of the step under way; None and nothing where no token has one."""

    def __init__(self, slab: AdapterSlab, ops: LoraOps) -> None:
        self._slab = slab
        self._ops = ops
        self.rows: AdapterRows | None = None
        self.slots: frozenset[int] = frozenset()
        self._bounds: list[tuple[int, int]] = []

    def begin(self, batch: ForwardBatch) -> None:
        rows = self.rows = batch.adapters
        self.slots = frozenset() if rows is None else frozenset(slot for _, _, slot in rows.segments)

    def attach(self, linears: Iterable[AdaptableLinear]) -> None:
        """`linears` have the slab's sections as their parts, in its order."""
        first = 0
        for linear in linears:
            last = first + len(linear.parts)
            assert linear.parts == self._slab.shape.parts[first:last], "another decoder's layers"
            linear.delta = SiteDelta(self, first, last)
            self._bounds.append((first, last))
            first = last

    def sections(self, first: int, last: int) -> list[SectionTables]:
        """Those of [first, last) that an adapter of the step changes."""
        slots, slab = self.slots, self._slab
        pairs = zip(slab.tables[first:last], slab.slots_of[first:last], strict=True)
        return [tables for tables, users in pairs if not slots.isdisjoint(users)]

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, sections: list[SectionTables], rows: AdapterRows) -> None:
        self._ops.add(y_TO, x_TI, self._slab.slab_PE, sections, rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Builds what the operations build when first used. Slot 0 is empty: nothing is added."""
        slab = self._slab.slab_PE
        sites = [self._slab.tables[first:last] for first, last in self._bounds]
        distinct = {tuple((s.inputs, s.outputs, s.start) for s in sections): sections for sections in sites}
        for count in WARM_UP_TOKENS:
            rows = AdapterRows(torch.zeros(count, dtype=torch.int32, device=slab.device), [(0, count, 0)])
            for sections in distinct.values():
                columns = max(section.start + section.outputs for section in sections)
                y_TO = torch.zeros(count, columns, dtype=slab.dtype, device=slab.device)
                x_TI = torch.zeros(count, sections[0].inputs, dtype=slab.dtype, device=slab.device)
                self.add(y_TO, x_TI, sections, rows)


class SiteDelta:
    """What adapters add to one (merged) linear layer, sections [first, last) of the slab."""

    def __init__(self, sites: AdapterSites, first: int, last: int) -> None:
        self._sites = sites
        self._first, self._last = first, last

    def __call__(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        rows = self._sites.rows
        if rows is None:
            return
        sections = self._sites.sections(self._first, self._last)
        if sections:
            self._sites.add(y_TO, x_TI, sections, rows)
