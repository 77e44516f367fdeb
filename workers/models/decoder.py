"""The decoder: one class for every registered family, sharded over tp and pp.

Built on each rank by `build_decoder`, run by the model runner under torch.inference_mode. It handles tensors only; it
has no notion of requests, scheduling or sampling. T tokens of a step, S rows that sample, H hidden size, V vocabulary.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from tandem.offload.weights.weight_stream import Copier, WeightStream
from tandem.parallel.checkpoint import DummySource, LoadFormat, OnBytes, ParameterSlot, WeightSource, load
from tandem.parallel.context import ParallelContext
from tandem.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from tandem.parallel.linear import AdaptableLinear, LinearPart
from tandem.parallel.mesh import layer_range
from tandem.parallel.quantization.stored_weights import UndoneTable, is_stored
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.workers.attention.backend import DECODE_QUERIES, AttentionBackend, KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.models.layers.arrangements import make_layer
from tandem.workers.models.layers.entry import Entry
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.norms import AddNorm, make_norm
from tandem.workers.models.layers.positions import RotaryPositions
from tandem.workers.models.spec.arch import ArchSpec, LayerSpec, Mla, RopeSpec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.models.spec.stage_taps import StageTaps, stage_taps
from tandem.workers.models.step_tensors import Heard, StepRoom
from tandem.workers.planning.sizes import rank_weights
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.platforms.base import Platform


class DecoderAdapters(Protocol):
    """The LoRA adapters of the layers (workers/lora/device/lora_layers.py). `begin` runs before a step, which may be
    captured (batch.real_T), `begin_layers` before its first layer."""

    name: Hashable
    """Identifies the calls of the step that has begun, if it has adapters: equal names mean the same calls, whatever
    begin_layers gets."""

    @property
    def reads_slots(self) -> bool:
        """True if one capture serves any mix of adapters: then all steps that have some have one name."""
        ...

    def begin(self, batch: ForwardBatch) -> None: ...

    def begin_layers(self, rows: AdapterRows | None, *, is_captured: bool) -> None:
        """Takes the rows' adapters from here, the batch's values. is_captured: steps to come may be replays of it."""
        ...

    def begin_head(self, rows: AdapterRows | None) -> None:
        """Runs before the head computes further rows of the step."""
        ...


class Table(NamedTuple):
    """A vocabulary table as adapters see it: a sharded layer, and the owner of its LoRA hook."""

    part: LinearPart
    place: VocabParallelEmbedding | VocabParallelHead


class Decoder:
    """This rank's shard: the embedding on the first stage, its layers, the final norm and the head on the last."""

    def __init__(
        self,
        spec: ArchSpec,
        context: ParallelContext,
        attention: AttentionBackend | LatentBackend,
        platform: Platform,
        dtype: torch.dtype,
        stream: WeightStream,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        spec.check_parallel(context.tp_size, context.pp_size, expert_parallel=context.mesh.expert_parallel)
        ops = platform.fused_ops(dtype)
        make = partial(platform.linear, dtype=dtype)
        self.parameters = parameters_of(spec)
        self.layer_ids = layer_range(spec.num_layers, context.pp_rank, context.pp_size)
        self.kv_layouts = kv_layouts(spec, context.mesh, windows)
        self.weight_bytes = 0
        self._mesh = context.mesh
        self._dtype = dtype
        self._hidden_size, self._vocab_size, self._num_layers = spec.hidden_size, spec.vocab_size, spec.num_layers
        self._adapters: DecoderAdapters | None = None
        self.taps = StageTaps()
        """Layers before which steps keep the residual stream, for heads that read it."""
        self.heard: Heard | None = None
        self.stream = stream
        ropes = spec.ropes
        self._ropes = [RotaryPositions(rope, spec.rope_dim, platform.device) for rope in ropes]
        self._layers = [
            make_layer(
                spec.layers[layer],
                self.parameters.layers[layer],
                context,
                ops,
                partial(make, place=stream.place_of(index)),
                partial(platform.experts, dtype, stream.place_of(index)),
                _rope_of(spec.layers[layer], ropes),
            )
            for index, layer in enumerate(self.layer_ids)
        ]
        self._attention = attention
        self.graphs = platform.graphs(stream.invalidate, stream.can_replay, context.tp)
        self._softcap, self._logit_scale = spec.final_softcap, spec.logit_scale
        self._embedding: VocabParallelEmbedding | None = None
        self._entry: Entry | None = None
        self._final_norm: AddNorm | None = None
        self._head: VocabParallelHead | None = None
        if context.is_first_stage:
            self._embedding = VocabParallelEmbedding(self.parameters.embedding, context)
            self._entry = Entry(spec, self.parameters, ops)
        if context.is_last_stage:
            self._final_norm = make_norm(spec.final_norm, self.parameters.final_norm, ops)
            self._head = VocabParallelHead(self.parameters.head, context, make, self.parameters.head_bias)
        is_tied = self.parameters.head is self.parameters.embedding
        self._ties_here = is_tied and self._embedding is not None and self._head is not None

    @property
    def tp_size(self) -> int:
        return self._mesh.tp_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def num_local_layers(self) -> int:
        return len(self._layers)

    @property
    def expert_loads(self) -> dict[int, torch.Tensor]:
        """Tokens that each expert has got, int64, by layer of this stage that has experts; steps add to them."""
        loads = zip(self.layer_ids, (layer.expert_loads_E for layer in self._layers), strict=True)
        return {layer: loads_E for layer, loads_E in loads if loads_E is not None}

    def listen(self, taps: Sequence[int]) -> None:
        """Has all later steps keep the residual stream before these layers; the number of layers: behind the last one.
        Every stage is told the same ones."""
        self.taps = stage_taps(taps, self._num_layers, self._mesh)

    def forward(
        self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None, passed: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """Runs one step. `hidden_TH`: the previous stage's output, None on the first; it may be overwritten. passed:
        [T, H] each, what stages before have kept, as taps.passed says.

        Returns the residual stream [T, H] in the weights' dtype for the next stage, or on the last stage logits [S, V]
        in float32, for the batch's `logits_rows_S`: all of them on tp rank 0, none on the others.
        """
        branch_TH, residual_TH = self._run_layers(batch, kv, hidden_TH, passed)
        if self._head is None:
            return residual_TH + branch_TH
        return self._logits(self.normed(branch_TH, residual_TH, batch.logits_rows_S))

    def forward_and_pool(
        self,
        batch: ForwardBatch,
        kv: KVTensors,
        hidden_TH: torch.Tensor | None,
        rows_P: torch.Tensor,
        passed: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step as forward() does, on the last stage. Returns the logits [S, V] and, for the tokens at rows_P
        (indices into T), the hidden states [P, H] after the final norm, in the weights' dtype, whole on every tp
        rank."""
        assert self._head is not None, "only the last stage has the hidden states after all layers"
        branch_TH, residual_TH = self._run_layers(batch, kv, hidden_TH, passed)
        hidden_PH = self.normed(branch_TH, residual_TH, rows_P)
        return self._logits(self.normed(branch_TH, residual_TH, batch.logits_rows_S)), hidden_PH

    def forward_into(self, batch: ForwardBatch, kv: KVTensors, room: StepRoom, *, by_shards: bool = False) -> None:
        """Runs one step as forward() does, for a graph: its hidden_TH is in the room, its results will be there.
        by_shards: on each tp rank the logits of its own part of the vocabulary, as part_of() says."""
        tokens = slice(batch.num_tokens)
        taps = tuple(tap_TH[tokens] for tap_TH in room.taps)
        room = StepRoom(room[0][tokens], room[1][tokens], room.logits_SV[: len(batch.logits_rows_S)], taps)
        embedded_TH = self._embedded(batch)
        if embedded_TH is not None:
            room.residual_TH.copy_(embedded_TH)
        branch_TH, residual_TH, *_ = self._walk(self._inputs(batch, kv, room.residual_TH, room.taps))
        room.branch_TH.copy_(branch_TH if self._head is not None else residual_TH + branch_TH)
        if self._head is None:
            return
        hidden_SH = self.normed(branch_TH, residual_TH, batch.logits_rows_S)
        if by_shards:
            self._scaled(self._head.own(hidden_SH, self.part_of(room.logits_SV)))
        else:
            self._logits(hidden_SH, room.logits_SV if self._head.gathers else None)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings [T, H] of tokens, on the first stage, without adapters."""
        assert self._embedding is not None, "only the first stage has the embedding"
        if self._adapters is not None:
            self._adapters.begin_layers(None, is_captured=False)
        return self._embedding(ids_T)

    def part_of(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Returns where the logits of this rank's part are in the memory of so many rows, [S, len(own_ids)]."""
        size = len(logits_SV) * len(self.own_ids)
        return logits_SV.view(-1)[:size].view(len(logits_SV), -1)

    @property
    def own_ids(self) -> range:
        """The tokens of this rank's part of the vocabulary, on the last stage."""
        assert self._head is not None, "only the last stage has the head"
        return self._head.own_ids

    @property
    def has_shards(self) -> bool:
        """True where ranks of this stage have parts of the vocabulary's logits."""
        return self._head is not None and self.tp_size > 1

    def room(self, num_tokens: int, num_samples: int, device: torch.device) -> StepRoom:
        """Returns memory for captured steps of up to so many tokens."""
        residual_TH = torch.zeros((num_tokens, self._hidden_size), dtype=self._dtype, device=device)
        width = self._vocab_size if self._head is None or self._head.gathers else len(self.own_ids)
        logits_SV = torch.zeros((num_samples * (self._head is not None), width), device=device)
        return StepRoom(residual_TH, residual_TH.clone(), logits_SV, tuple(residual_TH.clone() for _ in self.taps.own))

    def logits(self, hidden_PH: torch.Tensor, adapters: AdapterRows | None) -> torch.Tensor:
        """Returns the logits [P, V], float32, on tp rank 0, of hidden states that forward_and_pool() has returned, in
        the same step. adapters: those of the rows P."""
        assert self._head is not None, "only the last stage has the head"
        if self._adapters is not None:
            self._adapters.begin_head(adapters)
        return self._logits(hidden_PH)

    def hear(self, room: StepRoom, passed: Sequence[torch.Tensor]) -> None:
        """Keeps what forward_into() has left in a room as forward() keeps a step's. passed: as there."""
        self._hear_all(room.branch_TH, room.residual_TH, room.taps, passed)

    def _hear_all(
        self,
        branch_TH: torch.Tensor,
        residual_TH: torch.Tensor,
        own: Sequence[torch.Tensor],
        passed: Sequence[torch.Tensor],
    ) -> None:
        """Keeps the rests of a step. own: of the taps of this stage."""
        kept = dict(zip((*self.taps.passed, *self.taps.own), (*passed, *own), strict=True))
        self.heard = Heard(branch_TH, residual_TH, tuple(kept[tap] for tap in self.taps.heard))

    def _run_layers(
        self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None, passed: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (the last layer's MLP output, the residual to add it to), both [T, H]; the next step may overwrite
        both."""
        self.heard = None  # gives the memory of the last step back ahead of this one's
        embedded_TH = self._embedded(batch)
        residual_TH = hidden_TH if embedded_TH is None else embedded_TH
        assert residual_TH is not None, "a later stage needs the hidden states of the one before"
        inputs = self._inputs(batch, kv, residual_TH, tuple(torch.empty_like(residual_TH) for _ in self.taps.own))
        branch_TH, residual_TH, *taps = self.graphs.run(self.replay_key(inputs.shape, kv), inputs, self._walk)
        self._hear_all(branch_TH, residual_TH, taps, passed)
        return branch_TH, residual_TH

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Begins a step; returns its residual stream on the first stage."""
        if self._adapters is not None:
            self._adapters.begin(batch)
        if self._embedding is None or self._entry is None:
            return None
        return self._entry(self._embedding(batch.input_ids_T), batch.positions_T)

    def _inputs(
        self, batch: ForwardBatch, kv: KVTensors, residual_TH: torch.Tensor, taps: tuple[torch.Tensor, ...]
    ) -> LayerInputs:
        return LayerInputs(
            batch,
            residual_TH,
            [batch.slot_mapping_T, *(table.slot_mapping_T for table in batch.further_groups)],
            tuple(rope.angles(batch.positions_T, residual_TH.dtype) for rope in self._ropes),
            batch.adapters,
            self._attention,
            kv,
            batch.num_tokens,
            taps,
        )

    def _walk(self, inputs: LayerInputs) -> tuple[torch.Tensor, ...]:
        """Runs the layers; returns as _run_layers does, and what the taps hear."""
        if self._adapters is not None:
            self._adapters.begin_layers(inputs.adapters, is_captured=inputs.is_static)
        branch_TH: torch.Tensor | None = None
        taps = dict(zip(self.taps.own, inputs.taps, strict=True))
        for number, layer, layer_kv in zip(
            self.layer_ids, self.stream.in_turn(self._layers), inputs.kv.layers, strict=True
        ):
            self.graphs.begin_layer()
            _hear(taps.get(number), branch_TH, inputs.residual_TH)
            branch_TH = layer(branch_TH, inputs, layer_kv)
        assert branch_TH is not None, "a stage without layers"
        _hear(taps.get(self.layer_ids.stop), branch_TH, inputs.residual_TH)
        return branch_TH, inputs.residual_TH, *inputs.taps

    def _logits(self, hidden_SH: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits [S, V] of hidden states after the final norm."""
        assert self._head is not None
        return self._scaled(self._head(hidden_SH, out_SV))

    def _scaled(self, logits_SV: torch.Tensor) -> torch.Tensor:
        """Returns the head's logits as the model has them, in place."""
        if self._logit_scale != 1.0:
            logits_SV.mul_(self._logit_scale)
        if self._softcap is None:
            return logits_SV
        return logits_SV.div_(self._softcap).tanh_().mul_(self._softcap)

    def normed(self, branch_TH: torch.Tensor, residual_TH: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns new hidden states [len(rows), H] after the final norm."""
        assert self._final_norm is not None
        return self._final_norm(branch_TH[rows], residual_TH[rows])

    # ---- captures ----

    def replay_key(self, shape: StepShape, kv: KVTensors) -> Hashable | None:
        """Returns what tells the calls of a step apart beside the number of its tokens; None where it is not
        replayed."""
        if not shape.is_loaded or not isinstance(kv.layers, list):
            return None
        key = self._attention.replay_key(shape, kv.layers[0], self._dtype)
        name = self._adapters.name if shape.has_adapters and self._adapters is not None else None
        own = shape.most_queries > DECODE_QUERIES, shape.has_adapters, shape.by_shards, name, id(kv)
        return None if key is None else (key, *own)

    @property
    def captures_adapters(self) -> bool:
        """True if one capture serves any mix of adapters."""
        return self._adapters is not None and self._adapters.reads_slots

    def linears(self) -> Iterator[AdaptableLinear]:
        """Yields the linear layers of this rank, in the order of the model's."""
        for layer in self._layers:
            yield from layer.linears()

    @property
    def tables(self) -> tuple[Table | None, Table | None]:
        """The embedding and the head, where this rank has them."""
        embedding = head = None
        if self._embedding is not None:
            embedding = Table(self._embedding.part(self.parameters.embedding.stem), self._embedding)
        if self._head is not None:
            head = Table(self._head.part(self.parameters.head_name), self._head)
        return embedding, head

    def adapt(self, adapters: DecoderAdapters) -> None:
        """Attaches `adapters`, whose `begin` is called with every later step."""
        self._adapters = adapters

    def slots(self) -> Iterator[ParameterSlot]:
        """Yields every parameter of this rank. A tied table that is used at both ends on this rank is read once and
        shared."""
        if self._head is not None:
            yield from self._head.bias_slots()
        if self._embedding is not None:
            if is_stored((self.parameters.embedding,)):
                yield from self._undone_slots(self._embedding)
            else:
                for slot in self._embedding.slots():
                    yield self._tied_slot(slot) if self._ties_here else slot
        if self._entry is not None:
            yield from self._entry.slots()
        for layer in self._layers:
            yield from layer.slots()
        if self._final_norm is not None and self._head is not None:
            yield from self._final_norm.slots()
            if not self._ties_here:
                yield from self._head.slots()

    def load(
        self,
        source: WeightSource,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool,
        on_bytes: OnBytes | None = None,
    ) -> None:
        """Fills every parameter and counts `weight_bytes`."""
        slots = list(self.slots())
        self.weight_bytes = load(
            slots, source, dtype=dtype, device=device, progress=progress, mesh=self._mesh, on_bytes=on_bytes
        )
        if self._ties_here and self._head is not None:
            self.weight_bytes += self._head.copied_bytes
        self.stream.begin()

    def close(self) -> None:
        """Ends the weight stream, if there is one. Idempotent; no step may follow."""
        self.graphs.close()
        self.stream.close()

    def _undone_slots(self, embedding: VocabParallelEmbedding) -> Iterator[ParameterSlot]:
        """Yields the slots of an embedding that the checkpoint has as codes, which are undone at load."""
        table = UndoneTable(self.parameters.embedding, self._mesh, self._dtype, embedding.accept)
        yield from table.slots()

    def _tied_slot(self, slot: ParameterSlot) -> ParameterSlot:
        """Returns the embedding's slot as that of both tables."""
        assert self._head is not None
        return ParameterSlot(slot.params, self._accept_tied, as_stored=self._head.reads_stored)

    def _accept_tied(self, table_VH: torch.Tensor) -> None:
        assert self._embedding is not None and self._head is not None
        self._embedding.accept(table_VH.to(self._dtype))
        self._head.accept(table_VH)


def _hear(tap_TH: torch.Tensor | None, branch_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> None:
    """Keeps the residual stream with what the layer before adds to it, where a tap is there."""
    if tap_TH is None:
        return
    tap_TH.copy_(residual_TH)
    if branch_TH is not None:
        tap_TH.add_(branch_TH)


def _rope_of(layer: LayerSpec, ropes: Sequence[RopeSpec]) -> int | None:
    """Returns which of the model's ropes a layer has; None for none."""
    return None if layer.position is None else ropes.index(layer.position)


def attention_of(
    spec: ArchSpec, platform: Platform, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> AttentionBackend | LatentBackend:
    """Return the platform's attention for the model's layers, all of which have heads or all latents."""
    if isinstance(latents := spec.layers[0].attention, Mla):
        return platform.latent_attention(dtype, latents, kv_dtype)
    return platform.attention(dtype, spec.head_dim, kv_dtype)


def build_decoder(
    spec: ArchSpec,
    context: ParallelContext,
    *,
    folder: Path,
    dtype: torch.dtype,
    platform: Platform,
    kv_dtype: torch.dtype | None = None,
    attention: AttentionBackend | LatentBackend | None = None,
    load_format: LoadFormat = "safetensors",
    seed: int = 0,
    progress: bool = False,
    on_bytes: OnBytes | None = None,
    streamed: Sequence[int] = (),
    copier: Copier | None = None,
    windows: tuple[int | None, ...] = (None,),
    overrides: Mapping[str, Any] | None = None,
) -> Decoder:
    """Returns this rank's decoder with its weights, from `folder` or random (load_format dummy).

    kv_dtype: the cache's dtype, None for `dtype`; attention and copier: in place of the platform's. `streamed`: indices
    on this rank of layers that are kept in host memory and pass through the device. Such a decoder must be closed.
    windows: of the groups of layers that have block tables of their own (spec/kv_layout.py). overrides: --hf-overrides,
    for errors.
    on_bytes: a callback for the loading's progress, on every rank; `progress`: shows a bar, on rank 0. Raises
    SettingsError for a model that cannot be sharded this way, and for a checkpoint that does not match its config.json.
    """
    if load_format == "dummy":
        spec = replace(spec, weights=spec.weights.unstored())
    if streamed and copier is None:
        weights = rank_weights(spec, context.mesh, dtype.itemsize, platform.packs(dtype))
        copier = platform.weight_copier(weights.layer_bytes * len(streamed))
    stream = WeightStream(streamed, copier)
    attention = attention or attention_of(spec, platform, dtype, kv_dtype)
    decoder = Decoder(spec, context, attention, platform, dtype, stream, windows)
    source: WeightSource
    if load_format == "dummy":
        source = DummySource(seed, dtype, platform.device)
    else:
        source = SafetensorsSource(open_checkpoint(folder, spec, overrides), platform.read_ahead)
    decoder.load(
        source, dtype=dtype, device=platform.device, progress=progress and context.rank == 0, on_bytes=on_bytes
    )
    return decoder
