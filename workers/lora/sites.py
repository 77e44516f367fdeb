"""The places in the decoder where adapters add something: a Delta for each linear layer of this rank and each table.

Attached by memory.py when --enable-lora is on; told of each step by the decoder. A step without an adapter, and a layer
that no adapter of the step changes, cost a comparison. T tokens, S rows that sample, R the highest rank, H hidden size.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch

from parallel.linear import AdaptableLinear
from workers.kernels.lora import AdapterRows, LoraOps, SectionTables
from workers.lora.slab import AdapterSlab
from workers.models.forward_batch import ForwardBatch

WARM_UP_TOKENS = (1, 64)


class AdapterSites:
    """The Adapters of a decoder. `rows` of the tokens, `sample_rows` of those whose logits are wanted, `slots`: of the
    step under way; None and nothing where no token has one."""

    def __init__(self, slab: AdapterSlab, ops: LoraOps) -> None:
        self._slab = slab
        self._ops = ops
        self.rows: AdapterRows | None = None
        self.sample_rows: AdapterRows | None = None
        self.slots: frozenset[int] = frozenset()
        self.name: Hashable = None
        self._bounds: list[tuple[int, int]] = []
        self._chosen: dict[tuple[int, int], list[SectionTables]] = {}
        self._chosen_for: tuple[frozenset[int], int] = (self.slots, 0)

    def begin(self, batch: ForwardBatch) -> None:
        rows = self.rows = batch.adapters
        self.sample_rows = batch.sample_adapters
        self.slots = frozenset() if rows is None else frozenset(slot for _, _, slot in rows.segments)
        self.name = None if rows is None else (tuple(rows.segments), self._slab.changes)
        if (wanted := (self.slots, self._slab.changes)) != self._chosen_for:
            self._chosen_for = wanted
            self._chosen.clear()

    def attach(self, linears: Iterable[AdaptableLinear]) -> int:
        """The slab's first sections are the parts of `linears`, in its order; how many those are."""
        first = 0
        for linear in linears:
            last = first + len(linear.parts)
            assert linear.parts == self._slab.shape.parts[first:last], "another decoder's layers"
            linear.delta = LinearDelta(self, first, last)
            self._bounds.append((first, last))
            first = last
        return first

    def head(self, first: int, last: int) -> "HeadDelta":
        """The Delta of the head, whose pieces are the slab's sections [first, last)."""
        self._bounds.append((first, last))
        return HeadDelta(self, first, last)

    def embedding(self, first: int, last: int) -> "EmbeddingDelta":
        """The Delta of the embedding, whose pieces are the slab's sections [first, last)."""
        return EmbeddingDelta(self, self._slab, first, last)

    def sections(self, first: int, last: int) -> list[SectionTables]:
        """Those of [first, last) that an adapter of the step changes. Kept while the steps' slots and what lies in them
        stay the same."""
        chosen = self._chosen.get((first, last))
        if chosen is None:
            slots, slab = self.slots, self._slab
            pairs = zip(slab.tables[first:last], slab.slots_of[first:last], strict=True)
            chosen = self._chosen[first, last] = [tables for tables, users in pairs if not slots.isdisjoint(users)]
        return chosen

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, sections: list[SectionTables], rows: AdapterRows) -> None:
        self._ops.add(y_TO, x_TI, self._slab.memory_PE, sections, rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Builds what the operations build when first used. Slot 0 is empty: nothing is added."""
        slab = self._slab.memory_PE
        sites = [self._slab.tables[first:last] for first, last in self._bounds]
        distinct = {tuple((s.inputs, s.outputs, s.start) for s in sections): sections for sections in sites}
        for count in WARM_UP_TOKENS:
            rows = AdapterRows(torch.zeros(count, dtype=torch.int32, device=slab.device), [(0, count, 0)])
            for sections in distinct.values():
                columns = max(section.start + section.outputs for section in sections)
                y_TO = torch.zeros(count, columns, dtype=slab.dtype, device=slab.device)
                x_TI = torch.zeros(count, sections[0].inputs, dtype=slab.dtype, device=slab.device)
                self.add(y_TO, x_TI, sections, rows)


class LinearDelta:
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


class HeadDelta:
    """What adapters add to the logits, on the rows that sample."""

    def __init__(self, sites: AdapterSites, first: int, last: int) -> None:
        self._sites = sites
        self._first, self._last = first, last

    def __call__(self, y_SV: torch.Tensor, x_SH: torch.Tensor) -> None:
        rows = self._sites.sample_rows
        if rows is None or not rows.segments:
            return
        sections = self._sites.sections(self._first, self._last)
        if sections:
            self._sites.add(y_SV, x_SH, sections, rows)


class EmbeddingDelta:
    """What adapters add to the embedding: x is one-hot, so x @ A.T is a lookup; B is applied as anywhere, A being 1."""

    def __init__(self, sites: AdapterSites, slab: AdapterSlab, first: int, last: int) -> None:
        self._sites = sites
        self._slab = slab
        self._first, self._last = first, last
        self._first_ids = [part.inputs.start for part in slab.shape.parts[first:last]]

    def __call__(self, y_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
        """x: token ids, int64. Those that other ranks hold add nothing here."""
        rows = self._sites.rows
        if rows is None or not self._sites.sections(self._first, self._last):
            return
        pieces = self._slab.tables[self._first : self._last]
        shrunk_TR = self._look_up(ids_T, rows.slots_T, pieces)
        expand = replace(pieces[0], a_rows=self._unit_rows(pieces[0]), inputs=shrunk_TR.shape[1])
        self._sites.add(y_TH, shrunk_TR, [expand], rows)

    def _look_up(self, ids_T: torch.Tensor, slots_T: torch.Tensor, pieces: list[SectionTables]) -> torch.Tensor:
        """x @ A.T in the slab's dtype, [T, R]: exact, a token is in one piece at most."""
        memory = self._slab.memory_PE.view(-1)
        slots = slots_T.long().clamp(min=0)
        shrunk_TR = torch.zeros(len(ids_T), pieces[0].a_rows.shape[1], dtype=memory.dtype, device=memory.device)
        for piece, first_id in zip(pieces, self._first_ids, strict=True):
            local_T = ids_T - first_id
            inside_T = (local_T >= 0) & (local_T < piece.inputs) & (slots_T >= 0)
            starts_TR = piece.a_rows[slots]
            places_TR = starts_TR + local_T.masked_fill(~inside_T, 0)[:, None]
            held_TR = inside_T[:, None] & (starts_TR >= 0)
            shrunk_TR += memory[places_TR.clamp(min=0)].masked_fill(~held_TR, 0)
        return shrunk_TR

    def _unit_rows(self, piece: SectionTables) -> torch.Tensor:
        """For A = 1: rows of the identity for the ranks that a slot has."""
        max_rank = piece.a_rows.shape[1]
        first = self._slab.identity_start
        steps = torch.arange(first, first + max_rank * max_rank, max_rank, device=piece.b_rows.device)
        return torch.where(piece.b_rows < 0, -1, steps).contiguous()
