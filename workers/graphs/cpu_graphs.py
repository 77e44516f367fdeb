"""Runs a step through a rank's layers; on CPU, decode steps with the same graph key replay captured kernel calls.

The graph key: as many tokens of rows that decode (with drafts, several tokens of a row), and the same adapters on the
same tokens. Such steps call the same kernels on the same memory; only the inputs differ, which are copied to the
captured ones. Replay skips the Python between the kernels (workers/kernels/cpu/cpu_calls.py). On a GPU the equivalent
is one CUDA graph per batch size. Other steps run eagerly: prefill, blocks loading from a host tier, TP, layers that
stream by a thread, and layers of other operations than kernels, views and copies. T tokens, H hidden size.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from tandem.offload.weights.weight_stream import WeightStream
from tandem.workers.attention.backend import AttentionBackend, AttentionStep, KVTensors, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.cpu.cpu_calls import Arena, Capture, capturing
from tandem.workers.models.layers.decoder_layer import DecoderLayer
from tandem.workers.models.layers.positions import Angles

log = logging.getLogger(__name__)
MAX_ROWS = 64
MAX_CAPTURES = 64
RUNS_BEFORE_CAPTURE = 3
"""Steps of a graph key that run before one is captured: a capture takes as long as about three replays save."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a step's layers."""

    residual_TH: torch.Tensor
    slots_T: torch.Tensor
    angles: Angles | None

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        angles = () if self.angles is None else (self.angles.cos_T1D, self.angles.sin_T1D)
        return self.residual_TH, self.slots_T, *angles

    def clone(self) -> "Inputs":
        residual_TH, slots_T, *angles = (tensor.clone() for tensor in self._tensors())
        return Inputs(residual_TH, slots_T, Angles(*angles) if angles else None)

    def take(self, others: "Inputs") -> None:
        """Copies the others' values into this memory."""
        for mine, other in zip(self._tensors(), others._tensors(), strict=True):
            mine.copy_(other)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step: its calls, the memory of its inputs and results, and the cache that it uses."""

    calls: Capture
    inputs: Inputs
    step: ReplayableStep
    branch_TH: torch.Tensor
    kv: KVTensors


class CpuGraphRunner:
    """Runs the layers of one rank in order.

    `can_replay`: the layers run on the CPU without TP; set to False when a captured step contained another operation
    than kernels, views and copies. `num_replays`: the number of replayed steps.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], stream: WeightStream, attention: AttentionBackend, can_replay: bool
    ) -> None:
        self._layers = layers
        self._stream = stream
        self._attention = attention
        self.can_replay = can_replay and stream.can_replay
        self.num_replays = 0
        self._arena = Arena()
        self._captures: OrderedDict[Hashable, CapturedStep] = OrderedDict()
        self._seen: deque[Hashable] = deque(maxlen=RUNS_BEFORE_CAPTURE * MAX_CAPTURES)

    def run(
        self, batch: ForwardBatch, residual_TH: torch.Tensor, angles: Angles | None, kv: KVTensors, adapters: Hashable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (the last layer's MLP output, the residual to add it to), both [T, H]; the next step may overwrite
        both.

        `adapters` identifies the adapters' work in this step: equal values mean equal kernel calls.
        """
        inputs = Inputs(residual_TH, batch.slot_mapping_T, angles)
        key = (batch.num_tokens, adapters, id(kv), torch.get_num_threads()) if self._is_plain(batch, kv) else None
        if key in self._captures:
            self._captures.move_to_end(key)
            return self._replay(self._captures[key], batch, inputs)
        if key is not None:
            if self._seen.count(key) == RUNS_BEFORE_CAPTURE:
                return self._capture(key, batch, inputs, kv)
            self._seen.append(key)
        return self._walk(inputs, self._attention.prepare(batch), kv), residual_TH

    def close(self) -> None:
        """Drops the captures, which refer to memory that is about to be released. No step may follow."""
        self._captures.clear()

    def _is_plain(self, batch: ForwardBatch, kv: KVTensors) -> bool:
        is_decode = batch.num_tokens <= MAX_ROWS and max(batch.query_lens_list) <= self._attention.decode_queries
        return self.can_replay and is_decode and isinstance(kv.layers, list)

    def _walk(self, inputs: Inputs, step: AttentionStep, kv: KVTensors, arena: Arena | None = None) -> torch.Tensor:
        branch_TH: torch.Tensor | None = None
        for layer, layer_kv in zip(self._stream.in_turn(self._layers), kv.layers, strict=True):
            if arena is not None:
                arena.turn()
            branch_TH = layer(branch_TH, inputs.residual_TH, inputs.angles, step, layer_kv)
        assert branch_TH is not None, "a stage without layers"
        return branch_TH

    def _capture(
        self, key: Hashable, batch: ForwardBatch, inputs: Inputs, kv: KVTensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = inputs.clone()
        step = self._attention.prepare(replace(batch, slot_mapping_T=inputs.slots_T))
        self._stream.invalidate()
        with capturing(self._arena) as calls:
            branch_TH = self._walk(inputs, step, kv, self._arena)
        if not (calls.is_whole and isinstance(step, ReplayableStep)):
            self.can_replay = False
            log.info("decode steps are not replayed: a layer contains operations that cannot be captured")
            return branch_TH, inputs.residual_TH
        self._captures[key] = CapturedStep(calls, inputs, step, branch_TH, kv)
        if len(self._captures) > MAX_CAPTURES:
            oldest, _ = self._captures.popitem(last=False)
            self._seen = deque((seen for seen in self._seen if seen != oldest), self._seen.maxlen)
        return branch_TH, inputs.residual_TH

    def _replay(self, captured: CapturedStep, batch: ForwardBatch, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        captured.inputs.take(inputs)
        captured.step.set_batch(batch)
        self._stream.invalidate()
        captured.calls.replay()
        self.num_replays += 1
        return captured.branch_TH, captured.inputs.residual_TH
