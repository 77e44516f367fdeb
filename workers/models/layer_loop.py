"""One step through a rank's layers; on CPU, steps of decodes that are like the one before repeat its kernel calls.

Two steps are alike if they have as many rows, one token each, and the same adapters on the same rows: then the second
calls the same kernels on the same memory, but for what the step brings, which is copied to where the first had it. So
one of a kind that comes again and again is recorded (workers/kernels/cpu_calls.py), and those after it repeat it,
without the Python between the kernels. What it is on a GPU: a CUDA graph per batch size. T tokens, H hidden size.

Not repeated, but run: prompts, steps with blocks on their way up from a host tier, several ranks to a stage, layers
that stream by a thread of their own, and everything that is not kernels, views and copies (other activations and types,
CPUs without the kernels).
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.weight_stream import WeightStream
from workers.attention.backend import AttentionBackend, AttentionStep, KVTensors, RenewableStep
from workers.kernels.cpu_calls import Arena, Recording, recording
from workers.models.decoder_layer import DecoderLayer
from workers.models.forward_batch import ForwardBatch
from workers.models.positions import Angles

log = logging.getLogger(__name__)
MOST_ROWS = 64
MOST_RECORDS = 64
SIGHTINGS = 3
"""Steps of a kind that are run before one is recorded, which takes as long as repeating saves in about three."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step brings to its layers."""

    residual_TH: torch.Tensor
    angles: Angles
    slots_T: torch.Tensor

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return self.residual_TH, self.angles.cos_T1D, self.angles.sin_T1D, self.slots_T

    def clone(self) -> "Inputs":
        residual_TH, cos_T1D, sin_T1D, slots_T = (tensor.clone() for tensor in self._tensors())
        return Inputs(residual_TH, Angles(cos_T1D, sin_T1D), slots_T)

    def take(self, others: "Inputs") -> None:
        """Their values, in this memory."""
        for mine, other in zip(self._tensors(), others._tensors(), strict=True):
            mine.copy_(other)


@dataclass(frozen=True, slots=True)
class Record:
    """A step that can be repeated: its calls, its inputs and results, where they lie, and the cache that it uses."""

    calls: Recording
    inputs: Inputs
    step: RenewableStep
    branch_TH: torch.Tensor
    kv: KVTensors


class LayerLoop:
    """The layers of one rank, in turn. `may_repeat`: they run on the CPU and talk to no other rank; turns to False when
    they turn out to be such as cannot be repeated. `num_repeats`: steps that were."""

    def __init__(
        self, layers: Sequence[DecoderLayer], stream: WeightStream, attention: AttentionBackend, may_repeat: bool
    ) -> None:
        self._layers = layers
        self._stream = stream
        self._attention = attention
        self.may_repeat = may_repeat and stream.can_repeat
        self.num_repeats = 0
        self._arena = Arena()
        self._records: OrderedDict[Hashable, Record] = OrderedDict()
        self._seen: deque[Hashable] = deque(maxlen=SIGHTINGS * MOST_RECORDS)

    def run(
        self, batch: ForwardBatch, residual_TH: torch.Tensor, angles: Angles, kv: KVTensors, adapters: Hashable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the last layer's MLP output, the residual that it is to be added to), both [T, H]; both may lie in memory
        that the next step writes. `adapters` names what adapters do in this step: equal names, equal calls."""
        inputs = Inputs(residual_TH, angles, batch.slot_mapping_T)
        key = (batch.num_tokens, adapters, id(kv), torch.get_num_threads()) if self._is_plain(batch, kv) else None
        if key in self._records:
            self._records.move_to_end(key)
            return self._repeat(self._records[key], batch, inputs)
        if key is not None:
            if self._seen.count(key) == SIGHTINGS:
                return self._record(key, batch, inputs, kv)
            self._seen.append(key)
        return self._walk(inputs, self._attention.prepare(batch), kv), residual_TH

    def close(self) -> None:
        """No step may follow; what was recorded names memory that is let go."""
        self._records.clear()

    def _is_plain(self, batch: ForwardBatch, kv: KVTensors) -> bool:
        rows = len(batch.query_lens_list)
        is_decode = batch.num_tokens == rows <= MOST_ROWS
        return self.may_repeat and is_decode and isinstance(kv.layers, list)

    def _walk(self, inputs: Inputs, step: AttentionStep, kv: KVTensors, arena: Arena | None = None) -> torch.Tensor:
        branch_TH: torch.Tensor | None = None
        for layer, layer_kv in zip(self._stream.in_turn(self._layers), kv.layers, strict=True):
            if arena is not None:
                arena.turn()
            branch_TH = layer(branch_TH, inputs.residual_TH, inputs.angles, step, layer_kv)
        assert branch_TH is not None, "a stage without layers"
        return branch_TH

    def _record(
        self, key: Hashable, batch: ForwardBatch, inputs: Inputs, kv: KVTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = inputs.clone()
        step = self._attention.prepare(replace(batch, slot_mapping_T=inputs.slots_T))
        self._stream.forget()
        with recording(self._arena) as calls:
            branch_TH = self._walk(inputs, step, kv, self._arena)
        if not (calls.is_whole and isinstance(step, RenewableStep)):
            self.may_repeat = False
            log.info("decode steps are not repeated: a layer does more than the kernels that can be")
            return branch_TH, inputs.residual_TH
        self._records[key] = Record(calls, inputs, step, branch_TH, kv)
        if len(self._records) > MOST_RECORDS:
            oldest, _ = self._records.popitem(last=False)
            self._seen = deque((kind for kind in self._seen if kind != oldest), self._seen.maxlen)
        return branch_TH, inputs.residual_TH

    def _repeat(self, record: Record, batch: ForwardBatch, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        record.inputs.take(inputs)
        record.step.renew(batch)
        self._stream.forget()
        record.calls.repeat()
        self.num_repeats += 1
        return record.branch_TH, record.inputs.residual_TH
