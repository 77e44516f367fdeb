"""The inputs of a step's layers, as one record that a graph can hold. Made by decoder.py. T tokens, H hidden size."""

from dataclasses import dataclass
from typing import cast

import torch

from tandem.workers.attention.backend import AttentionBackend, AttentionStep, KVTensors, ListsBackend, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_backend import LatentBackend, LatentStep
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.models.layers.positions import Angles


@dataclass(slots=True)
class LayerInputs:
    """The inputs of a step's layers."""

    batch: ForwardBatch
    residual_TH: torch.Tensor  # the residual stream, to which the layers add in place
    slots_T: list[torch.Tensor]  # for each group of layers, where the tokens' K and V are stored
    angles: tuple[Angles, ...]  # of each of the model's ropes
    adapters: AdapterRows | None  # of the tokens
    backend: AttentionBackend | LatentBackend
    kv: KVTensors  # the cache, the same for all steps of a graph
    num_tokens: int
    taps: tuple[torch.Tensor, ...] = ()  # [T, H] each, for the residual stream before Decoder.taps.own
    _step: AttentionStep | LatentStep | None = None
    _replayable: ReplayableStep | None = None

    @property
    def attention(self) -> AttentionStep:
        """The step's attention, which all layers share, in models of heads."""
        if self._step is None:
            self._step = self.backend.prepare(self.batch)
        return cast(AttentionStep, self._step)

    @property
    def latent_attention(self) -> LatentStep:
        """The step's attention, which all layers share, in models of latents (Mla)."""
        if self._step is None:
            self._step = self.backend.prepare(self.batch)
        return cast(LatentStep, self._step)

    @property
    def shape(self) -> StepShape:
        """The batch's shape. An overlapped load is waited for layer by layer, which no graph does."""
        return self.batch.shape(is_loaded=isinstance(self.kv.layers, list))

    @property
    def is_static(self) -> bool:
        """True if a capture holds this memory."""
        return self._replayable is not None or self.batch.real_T is not None

    def static(self) -> "LayerInputs":
        step = cast(ListsBackend, self.backend).prepare_replay(self.batch)
        static = LayerInputs(
            self.batch,
            torch.empty_like(self.residual_TH),
            [torch.empty_like(slots_T) for slots_T in self.slots_T],
            tuple(Angles(torch.empty_like(one.cos_T1D), torch.empty_like(one.sin_T1D)) for one in self.angles),
            self.adapters and AdapterRows(torch.empty_like(self.adapters.slots_T), self.adapters.segments),
            self.backend,
            self.kv,
            self.num_tokens,
            tuple(torch.empty_like(tap_TH) for tap_TH in self.taps),
            cast(AttentionStep | LatentStep, step),
            step,
        )
        static.take(self)
        return static

    def take(self, inputs: "LayerInputs", /) -> None:
        assert self._replayable is not None, "inputs of one step alone"
        for mine, its in zip(self._tensors(), inputs._tensors(), strict=True):
            mine.copy_(its)
        self._replayable.set_batch(inputs.batch)

    def _tensors(self) -> list[torch.Tensor]:
        tensors = [self.residual_TH, *self.slots_T]
        for angles in self.angles:
            tensors += (angles.cos_T1D, angles.sin_T1D)
        if self.adapters is not None:
            tensors.append(self.adapters.slots_T)
        return tensors
