"""The Protocol of paged attention (PagedAttention, Kwon et al. 2023) and the KV tensors that it reads and writes.

The decoder calls `prepare` once per step and `forward` once per layer. Backends keep no state between steps. T tokens,
N query heads, K KV heads, D head dim. Caches are [num_blocks, block_size, K, D], FlashAttention's paged layout, in a
storage dtype that may differ from q's (workers/kernels/kv_store.py). A query reads every key and value from the cache,
those of its own step included, so results do not depend on how tokens are split into steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The paged cache of one rank, by local layer. Iterating may wait for a layer's blocks to arrive."""

    layers: Iterable[LayerKV]
    block_size: int


class AttentionStep(Protocol):
    """One step's attention: the state that all layers share."""

    def forward(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Writes k and v to the batch's slots of this layer's cache and returns out_TND, causal attention to each row's
        context. params.slopes: of q's heads."""
        ...


@runtime_checkable
class ReplayableStep(AttentionStep, Protocol):
    """A step whose calls may be captured and replayed (workers/graphs/cpu_graphs.py)."""

    def set_batch(self, batch: ForwardBatch) -> None:
        """Points the captured calls at another batch of as many tokens, of rows with at most decode_queries, with
        its slots in the same memory."""
        ...


class AttentionBackend(Protocol):
    """One way to compute attention on a device. decode_queries: the most queries of a row that it takes one by one, as
    decodes, so that the calls of a step of such rows depend on nothing but the number of tokens."""

    name: str
    decode_queries: int

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        """Groups the rows of a step. The batch must stay unchanged until the step has finished."""
        ...
