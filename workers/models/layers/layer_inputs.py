"""The inputs of a step's layers, as one record that a graph can hold. Made by decoder.py. T tokens, H hidden size."""

from dataclasses import dataclass
from typing import cast

import torch

from tandem.workers.attention.backend import AttentionBackend, AttentionStep, KVTensors, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_backend import LatentBackend, LatentStep, ReplayableLatentStep
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
    _step: AttentionStep | LatentStep | None = None
    _replayable: ReplayableStep | ReplayableLatentStep | None = None

    @property
    def attention(self) -> AttentionStep:
        """The step's attention, which all layers share, in models of heads."""
        if self._step is None:
            self._step = self.backend.prepare(self.batch)
        return cast(AttentionStep, self._step)

    @property
    def latent_attention(self) -> LatentStep:
        """The step's attention, which all layers share, in models of latents (ArchSpec.has_latents)."""
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
        return self._replayable is not None

    def static(self, num_tokens: int) -> "LayerInputs":
        def room(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.new_empty((num_tokens, *tensor.shape[1:]))

        adapters = self.adapters
        step = self.backend.prepare_replay(self.batch, num_tokens, self.kv.scratch_block)
        static = LayerInputs(
            self.batch,
            room(self.residual_TH),
            [room(slots_T) for slots_T in self.slots_T],
            tuple(Angles(room(angles.cos_T1D), room(angles.sin_T1D)) for angles in self.angles),
            None if adapters is None else AdapterRows(room(adapters.slots_T), adapters.segments),
            self.backend,
            self.kv,
            num_tokens,
            step,
            step,
        )
        static.take(self)
        return static

    def take(self, inputs: "LayerInputs", /) -> None:
        assert self._replayable is not None, "inputs of one step alone"
        count = inputs.num_tokens
        if count < self.num_tokens:
            self._pad(count)
        for mine, its in zip(self._tensors(), inputs._tensors(), strict=True):
            (mine if count == self.num_tokens else mine[:count]).copy_(its)
        self._replayable.set_batch(inputs.batch)

    def pad(self) -> None:
        assert self._replayable is not None, "inputs of one step alone"
        self._pad(0)
        self._replayable.set_batch(None)

    def _tensors(self) -> list[torch.Tensor]:
        tensors = [self.residual_TH, *self.slots_T]
        for angles in self.angles:
            tensors += (angles.cos_T1D, angles.sin_T1D)
        if self.adapters is not None:
            tensors.append(self.adapters.slots_T)
        return tensors

    def _pad(self, count: int) -> None:
        """Fills what is behind `count` tokens: zeros that are written to the scratch block, without an adapter."""
        for tensor in self._tensors():
            tensor[count:].zero_()
        for slots_T in self.slots_T:
            slots_T[count:].fill_(self.kv.scratch_block * self.kv.block_size)
        if self.adapters is not None:
            self.adapters.slots_T[count:].fill_(-1)
