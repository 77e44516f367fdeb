"""LayerWalk: a model run layer by layer with one layer's weights in memory, through the decoder's own layers.

A sequence's hidden states are the input of the next layer, so a layer is read once, runs all sequences, and is dropped.
Vocabulary tables are read in parts, as ranks would read theirs. Everything is computed in float32. N sequences of W
tokens, H hidden size, V vocabulary, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tandem.parallel.checkpoint import ParameterSlot, load
from tandem.parallel.context import ParallelContext
from tandem.parallel.embedding import VocabParallelHead
from tandem.parallel.linear_methods import LinearMethod
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Param
from tandem.parallel.quantization.coded import UndoneMethod
from tandem.parallel.quantization.stored_weights import UndoneTable, is_stored
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.expert_ops import TorchExperts
from tandem.workers.models.decoder import attention_of
from tandem.workers.models.layers.arrangements import make_layer
from tandem.workers.models.layers.decoder_layer import DecoderLayer
from tandem.workers.models.layers.entry import Entry
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.norms import make_norm
from tandem.workers.models.layers.positions import RotaryPositions
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.kv_layout import KVLayout, kv_layouts
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.platforms.base import Platform
from tandem.workers.quantize.rounding.recorded_linear import InputStats, RecordedLinear
from tandem.workers.rank.kv_cache import KVCache

BLOCK_SIZE = 16
PART_BYTES = 2**24
"""Bytes, in float32, of a vocabulary table that is read at a time, and the most of any tensors that are read ahead."""
LogitsOf = Callable[[torch.Tensor], torch.Tensor]
RowsOf = Callable[[slice], torch.Tensor]


class OpenLayer:
    """One layer with its weights. linears: those that it is made of, in the order in which they are used. values: each
    parameter by name, as memory that the layer computes with: what is written there counts in later runs."""

    def __init__(self, walk: "LayerWalk", index: int) -> None:
        self.index = index
        self.params = walk.table.layers[index]
        self.linears: list[RecordedLinear] = []
        self.values: dict[str, torch.Tensor] = {}
        self._walk = walk

        def make(weights: Sequence[Param], context: ParallelContext, /, place: object = None) -> LinearMethod:
            self.linears.append(RecordedLinear(weights, context))
            return self.linears[-1]

        spec = walk.spec.layers[index]
        rope = None if spec.position is None else walk.spec.ropes.index(spec.position)
        experts = partial(TorchExperts, make, lambda held: (held, None))
        self._layer: DecoderLayer = make_layer(spec, self.params, walk.context, walk.ops, make, experts, rope)
        walk.fill([self._seen(slot) for slot in self._layer.slots()])
        for linear in self.linears:
            for param in linear.params:
                self.values[param.name] = linear.weight()[linear.rows_of(param)]

    def run(self, hidden_WH: torch.Tensor) -> torch.Tensor:
        """Returns a sequence's hidden states behind the layer. hidden: those before it, which may be overwritten."""
        inputs = self._walk.inputs(hidden_WH, self.index)
        return inputs.residual_TH + self._layer(None, inputs, next(iter(inputs.kv.layers)))

    def begin_record(self, linears: Sequence[RecordedLinear]) -> None:
        """Later runs take sums over the inputs of these linears."""
        for linear in linears:
            linear.stats = InputStats(linear.inputs)

    def record(self, linears: Sequence[RecordedLinear], hidden: Iterator[torch.Tensor]) -> None:
        """Takes the sums over the inputs of these linears, of all sequences."""
        self.begin_record(linears)
        for hidden_WH in hidden:
            self.run(hidden_WH)
        self.end_record(linears)

    def end_record(self, linears: Sequence[RecordedLinear]) -> None:
        """Completes the sums, which later runs must not add to."""
        for linear in linears:
            assert linear.stats is not None
            linear.stats.finish()

    def _seen(self, slot: ParameterSlot) -> ParameterSlot:
        """Returns the slot, of what is no linear layer's weight, that notes where its parameters are."""
        if slot.holder is not None:
            return slot

        def accept(tensor: torch.Tensor) -> None:
            start = 0
            for param in slot.params:
                self.values[param.name] = tensor[start : start + param.shape[0]]
                start += param.shape[0]
            slot.accept(tensor)

        return replace(slot, accept=accept)


class LayerWalk:
    """A model's layers, one at a time. num_tokens: of every sequence."""

    def __init__(self, folder: Path, spec: ArchSpec, platform: Platform, num_tokens: int) -> None:
        self.spec = spec
        self.table = parameters_of(spec)
        self.checkpoint = open_checkpoint(folder, spec)
        self.context = ParallelContext.single()
        self.ops = platform.fused_ops(torch.float32)
        self.num_tokens = num_tokens
        self._platform = platform
        self._attention = attention_of(spec, platform, torch.float32)
        self._batch = _batch(num_tokens)
        ropes = (RotaryPositions(rope, spec.rope_dim, platform.device) for rope in spec.ropes)
        self._angles = tuple(rope.angles(self._batch.positions_T, torch.float32) for rope in ropes)
        self._layouts = kv_layouts(spec, self.context.mesh)
        self._kv = self._cache(0)

    def fill(self, slots: Sequence[ParameterSlot], mesh: Mesh = Mesh()) -> None:
        """Reads the parameters of slots, in float32."""
        bounds = self._platform.read_ahead._replace(many=PART_BYTES, pair=PART_BYTES)
        source = SafetensorsSource(self.checkpoint, bounds)
        load(slots, source, dtype=torch.float32, device=self._platform.device, progress=False, mesh=mesh)

    def inputs(self, hidden_WH: torch.Tensor, layer: int) -> LayerInputs:
        """Returns one sequence as a step's inputs of one layer."""
        if self._layouts[layer].planes != self._kv[0].planes:
            self._kv = self._cache(layer)
        batch, kv = self._batch, self._kv[1].tensors
        slots, tokens = [batch.slot_mapping_T], batch.num_tokens
        return LayerInputs(batch, hidden_WH, slots, self._angles, None, self._attention, kv, tokens)

    def embedded(self, ids_NW: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields each sequence's hidden states before the first layer, [W, H]."""
        wanted_U, place_NW = ids_NW.unique(return_inverse=True)
        rows_UH = torch.empty(len(wanted_U), self.spec.hidden_size)
        for first, part_VH in self.vocabulary(self.table.embedding):
            inside_U = (wanted_U >= first) & (wanted_U < first + len(part_VH))
            rows_UH[inside_U] = part_VH[wanted_U[inside_U] - first]
        entry = Entry(self.spec, self.table, self.ops)
        self.fill(list(entry.slots()))
        for place_W in place_NW:
            yield entry(rows_UH[place_W], self._batch.positions_T)

    def vocabulary(self, table: Param) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows [.., H]) of a table, part by part."""
        found: list[torch.Tensor] = []
        for mesh in self._parts():
            span = table.span(0, mesh)
            if is_stored((table,)):
                self.fill(list(UndoneTable(table, mesh, torch.float32, found.append).slots()), mesh)
            else:
                self.fill([ParameterSlot((table,), found.append)], mesh)
            yield span.start, found.pop()[: max(0, span.total - span.start)]

    def normed(self, hidden_WH: torch.Tensor) -> torch.Tensor:
        """Returns hidden states behind the last layer as the head gets them."""
        norm = make_norm(self.spec.final_norm, self.table.final_norm, self.ops)
        self.fill(list(norm.slots()))
        return norm.alone(hidden_WH)

    def head_parts(self, weights: RowsOf | None = None) -> Iterator[tuple[int, LogitsOf]]:
        """Yields the head in parts, in order: the first token of a part, and what makes logits [T, part of V] of hidden
        states [T, H] that normed() has returned. weights: in place of the checkpoint's."""
        make = partial(UndoneMethod, torch.float32)
        for mesh in self._parts():
            head = VocabParallelHead(self.table.head, ParallelContext(mesh), make, self.table.head_bias)
            self.fill([*head.bias_slots(), *(head.slots() if weights is None else ())], mesh)
            if len(own := head.own_ids):
                if weights is not None:
                    head.accept(weights(slice(own.start, own.stop)))
                yield own.start, partial(self._logits, head)

    def _logits(self, head: VocabParallelHead, normed_TH: torch.Tensor) -> torch.Tensor:
        logits_TP = head.own(normed_TH, torch.empty(len(normed_TH), len(head.own_ids))).mul_(self.spec.logit_scale)
        if (softcap := self.spec.final_softcap) is not None:
            logits_TP.div_(softcap).tanh_().mul_(softcap)
        return logits_TP

    def _parts(self) -> Iterator[Mesh]:
        """Yields the ranks that would share a vocabulary table."""
        count = -(-self.spec.vocab_size * self.spec.hidden_size * 4 // PART_BYTES)
        yield from (Mesh(count, 1, rank) for rank in range(count))

    def _cache(self, layer: int) -> tuple[KVLayout, KVCache]:
        layout, blocks = self._layouts[layer], -(-self.num_tokens // BLOCK_SIZE)
        return layout, KVCache.allocate([layout], blocks, BLOCK_SIZE, torch.float32, self._platform)


def _batch(num_tokens: int) -> ForwardBatch:
    """Returns one sequence of so many tokens, all of them in one step; its ids are looked up elsewhere."""
    places_T, blocks = torch.arange(num_tokens), -(-num_tokens // BLOCK_SIZE)
    return ForwardBatch(
        input_ids_T=places_T,
        positions_T=places_T,
        slot_mapping_T=places_T,
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_table_RN=torch.arange(blocks, dtype=torch.int32)[None],
        logits_rows_S=torch.empty(0, dtype=torch.int64),
        query_lens_list=[num_tokens],
        seq_lens_list=[num_tokens],
        block_size=BLOCK_SIZE,
    )
