"""What an attention implementation is: a Protocol, and the KV tensors that it reads and writes.

The decoder calls `prepare` once per step and `forward` once per layer. Backends keep no state between steps. T tokens,
N query heads, K KV heads, D head dim; caches are [num_blocks, block_size, K, D], FlashAttention's paged layout, in a
storage dtype that need not be q's (workers/kernels/kv_quant.py). A query sees every key and value as the cache holds
it, those of its own step too, so what is computed does not depend on how tokens are cut into steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from workers.kernels.kv_quant import LayerKV
from workers.models.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The paged cache of one rank, by local layer. Iterating may wait for a layer's blocks to arrive."""

    layers: Iterable[LayerKV]
    block_size: int


class AttentionStep(Protocol):
    """One step's attention: holds what is equal for all layers."""

    def forward(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Writes k and v to the batch's slots of this layer's cache, and attends causally to each row's context.
        `window`: a token sees that many last positions, itself included; None: all. Returns out_TND."""
        ...


@runtime_checkable
class RenewableStep(AttentionStep, Protocol):
    """A step whose calls may be recorded and repeated (workers/models/layer_loop.py)."""

    def renew(self, batch: ForwardBatch) -> None:
        """What was recorded computes another batch from now on, of as many rows with one query each. Its slots are
        where those of the recorded one were."""
        ...


class AttentionBackend(Protocol):
    """A way to compute attention on one device."""

    name: str

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        """Groups the rows of a step; the batch must stay unchanged until the step is done."""
        ...
