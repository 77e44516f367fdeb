"""LoraLayers: a LoRA hook for each linear layer of this rank and each vocabulary table.

Attached by rank_adapters.py when --enable-lora is on; the decoder calls begin() for each step. A step
without an adapter, and a layer that no adapter of the step changes, cost one comparison. T tokens, S rows that sample,
R the highest rank, H hidden size.
"""

from collections.abc import Hashable, Iterable
from dataclasses import replace

import torch

from tandem.parallel.linear import AdaptableLinear
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.lora_ops import AdapterRows, LoraOps, ProjectionTables
from tandem.workers.lora.device.slab import AdapterSlab


class LoraLayers:
    """The Adapters of a decoder. `rows` of the tokens, `sample_rows` of those whose logits are wanted, `slots`: of the
    step under way; None and nothing where no token has one. name: of a step that has adapters.
    is_whole: the calls are captured, with those of adapters to come."""

    def __init__(self, slab: AdapterSlab, ops: LoraOps) -> None:
        self._slab = slab
        self._ops = ops
        self.rows: AdapterRows | None = None
        self.sample_rows: AdapterRows | None = None
        self.slots: frozenset[int] = frozenset()
        self.name: Hashable = None
        self.is_whole = False
        self._bounds: list[tuple[int, int]] = []
        self._embeddings: list[EmbeddingLoraHook] = []
        self._chosen: dict[tuple[int, int], list[ProjectionTables]] = {}
        self._chosen_for: tuple[frozenset[int], int] = (self.slots, 0)

    @property
    def reads_slots(self) -> bool:
        return self._ops.reads_slots

    def begin(self, batch: ForwardBatch) -> None:
        rows = self.rows = batch.adapters
        self.sample_rows = batch.sample_adapters
        self.slots = frozenset() if rows is None else self._slots_of(rows)
        self.is_whole = batch.real_T is not None and self.reads_slots
        if rows is not None and not self.reads_slots:
            self.name = tuple(rows.segments), self._slab.changes
        if (wanted := (self.slots, self._slab.changes)) != self._chosen_for:
            self._chosen_for = wanted
            self._chosen.clear()

    def begin_layers(self, rows: AdapterRows | None, *, is_captured: bool) -> None:
        """The layers take the rows' slots from here, which a graph may hold. Where slots are read on the device, one
        that is captured has all projections, for adapters to come: the tables stay where they are."""
        self.rows = rows
        self.is_whole = is_captured and self.reads_slots

    def _slots_of(self, rows: AdapterRows) -> frozenset[int]:
        """The slots whose adapters decide which projections are computed: the step's, or all where calls may not
        depend on the step."""
        if self._ops.reads_slots:
            return frozenset().union(*self._slab.slots_of)
        return frozenset(slot for _, _, slot in rows.segments)

    def begin_head(self, rows: AdapterRows | None) -> None:
        """Note that the head computes these rows of the step."""
        self.sample_rows = rows

    def attach(self, linears: Iterable[AdaptableLinear]) -> int:
        """The slab's first projections are the parts of `linears`, in its order; how many those are."""
        first = 0
        for linear in linears:
            last = first + len(linear.parts)
            assert linear.parts == self._slab.shape.parts[first:last], "another decoder's layers"
            linear.lora_hook = LinearLoraHook(self, first, last)
            self._bounds.append((first, last))
            first = last
        return first

    def head(self, first: int, last: int) -> "HeadLoraHook":
        """Returns the LoRA hook of the head, whose pieces are the slab's projections [first, last)."""
        self._bounds.append((first, last))
        return HeadLoraHook(self, first, last)

    def embedding(self, first: int, last: int) -> "EmbeddingLoraHook":
        """Returns the LoRA hook of the embedding, whose pieces are the slab's projections [first, last)."""
        hook = EmbeddingLoraHook(self, self._slab, first, last)
        self._embeddings.append(hook)
        return hook

    def projections(self, first: int, last: int) -> list[ProjectionTables]:
        """Return those of [first, last) that an adapter of the step changes, or may change in steps to come. Kept while
        the steps' slots and what lies in them stay the same."""
        if self.is_whole:
            return self._slab.tables[first:last]
        chosen = self._chosen.get((first, last))
        if chosen is None:
            slots, slab = self.slots, self._slab
            pairs = zip(slab.tables[first:last], slab.slots_of[first:last], strict=True)
            chosen = self._chosen[first, last] = [tables for tables, users in pairs if not slots.isdisjoint(users)]
        return chosen

    def add(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, projections: list[ProjectionTables], rows: AdapterRows
    ) -> None:
        self._ops.add(y_TO, x_TI, self._slab.memory_PE, projections, rows)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Builds what the operations build when first used. Slot 0 is empty: nothing is added."""
        slab = self._slab.memory_PE
        layers = [self._slab.tables[first:last] for first, last in self._bounds]
        distinct = {tuple((s.inputs, s.outputs, s.start) for s in projections): projections for projections in layers}
        for count in self._ops.warm_up_tokens:
            rows = AdapterRows(torch.zeros(count, dtype=torch.int32, device=slab.device), [(0, count, 0)])
            for projections in distinct.values():
                columns = max(projection.start + projection.outputs for projection in projections)
                y_TO = torch.zeros(count, columns, dtype=slab.dtype, device=slab.device)
                x_TI = torch.zeros(count, projections[0].inputs, dtype=slab.dtype, device=slab.device)
                self.add(y_TO, x_TI, projections, rows)
            for embedding in self._embeddings:
                embedding.warm_up(rows)


class LinearLoraHook:
    """The addition of adapters to one (merged) linear layer, projections [first, last) of the slab."""

    def __init__(self, lora_layers: LoraLayers, first: int, last: int) -> None:
        self._layers = lora_layers
        self._first, self._last = first, last

    def __call__(self, y_TO: torch.Tensor, x_TI: torch.Tensor) -> None:
        rows = self._layers.rows
        if rows is None:
            return
        projections = self._layers.projections(self._first, self._last)
        if projections:
            self._layers.add(y_TO, x_TI, projections, rows)


class HeadLoraHook:
    """The addition of adapters to the logits, on the rows that sample."""

    def __init__(self, lora_layers: LoraLayers, first: int, last: int) -> None:
        self._layers = lora_layers
        self._first, self._last = first, last

    def __call__(self, y_SV: torch.Tensor, x_SH: torch.Tensor) -> None:
        rows = self._layers.sample_rows
        if rows is None or not (rows.segments or self._layers.is_whole):
            return
        projections = self._layers.projections(self._first, self._last)
        if projections:
            self._layers.add(y_SV, x_SH, projections, rows)


class EmbeddingLoraHook:
    """The addition of adapters to the embedding: x is one-hot, so x @ A.T is a lookup; B is applied as anywhere, A
    being 1."""

    def __init__(self, lora_layers: LoraLayers, slab: AdapterSlab, first: int, last: int) -> None:
        self._layers = lora_layers
        self._slab = slab
        self._first, self._last = first, last
        self._first_ids = [part.inputs.start for part in slab.shape.parts[first:last]]

    def __call__(self, y_TH: torch.Tensor, ids_T: torch.Tensor) -> None:
        """x: token ids, int64. Those that other ranks hold add nothing here."""
        rows = self._layers.rows
        if rows is None or not self._layers.projections(self._first, self._last):
            return
        pieces = self._slab.tables[self._first : self._last]
        self._expand(y_TH, self._look_up(ids_T, rows.slots_T, pieces), rows)

    def warm_up(self, rows: AdapterRows) -> None:
        """Calls what a step calls; slot 0, which all rows have, is empty."""
        ids_T = rows.slots_T.long()
        shrunk_TR = self._look_up(ids_T, rows.slots_T, self._slab.tables[self._first : self._last])
        self._expand(shrunk_TR.new_zeros(len(ids_T), self._slab.tables[self._first].outputs), shrunk_TR, rows)

    def _expand(self, y_TH: torch.Tensor, shrunk_TR: torch.Tensor, rows: AdapterRows) -> None:
        piece = self._slab.tables[self._first]
        expand = replace(piece, a_rows=self._unit_rows(piece), inputs=shrunk_TR.shape[1])
        self._layers.add(y_TH, shrunk_TR, [expand], rows)

    def _look_up(self, ids_T: torch.Tensor, slots_T: torch.Tensor, pieces: list[ProjectionTables]) -> torch.Tensor:
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

    def _unit_rows(self, piece: ProjectionTables) -> torch.Tensor:
        """Return what stands for A = 1: rows of the identity for the ranks that a slot has."""
        max_rank, first, stride = piece.a_rows.shape[1], self._slab.identity_start, self._slab.identity_stride
        steps = torch.arange(first, first + max_rank * stride, stride, device=piece.b_rows.device)
        return torch.where(piece.b_rows < 0, -1, steps).contiguous()
