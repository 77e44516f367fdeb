"""What an attention implementation is: a Protocol, and the KV tensors that it reads and writes.

The decoder calls `prepare` once per step and `forward` once per layer. Backends keep no state between steps. T tokens,
N query heads, K KV heads, D head dim; caches are [num_blocks, block_size, K, D], FlashAttention's paged layout.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.models.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The paged cache of one rank: per local layer one K and one V tensor [num_blocks, block_size, K, D]. Iterating
    them may wait for a layer's blocks to arrive."""

    keys: Iterable[torch.Tensor]
    values: Iterable[torch.Tensor]
    block_size: int


class AttentionStep(Protocol):
    """One step's attention: holds what is equal for all layers."""

    def forward(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Writes k and v to the batch's slots of this layer's `keys` and `values`, and attends causally to each row's
        context. `window`: a token sees that many last positions, itself included; None: all. Returns out_TND."""
        ...


class AttentionBackend(Protocol):
    """A way to compute attention on one device."""

    name: str

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        """Groups the rows of a step; the batch must stay unchanged until the step is done."""
        ...


def write_kv(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots_T: torch.Tensor
) -> None:
    """Stores the tokens' K and V at their slots (block id * block size + offset)."""
    keys.view(-1, *keys.shape[2:]).index_copy_(0, slots_T, k_TKD)
    values.view(-1, *values.shape[2:]).index_copy_(0, slots_T, v_TKD)
