"""The Protocol of paged attention (PagedAttention, Kwon et al. 2023) and the KV tensors that it reads and writes.

The decoder calls `prepare` once per step and `attend` once per layer, after the layer's K and V have been stored
(FusedOps.store). A step serves all groups of layers: the block table of a layer is that of its cache's group
(ForwardBatch.of_group). Backends keep no state between steps. T tokens, N query heads, K KV heads, D head dim. Caches
are [num_blocks, block_size, K, D], FlashAttention's paged layout, in a storage dtype that may differ from q's
(workers/kernels/kv_store.py). A query sees every key and value as the cache has stored it, those of its own step
included, so results do not depend on how tokens are split into steps. Where the cache stores them unchanged, the step's
own need not be gathered: the first chunk of a prompt reads no cache.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams

DECODE_QUERIES: Final = 17
"""The most queries of a row that are taken one by one, as decodes: a token and its drafts. They need no gather of the
row's context in one piece, and come out as in steps of one token each, on GPUs up to rounding."""


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The paged cache of one rank, by local layer. Iterating may wait for a layer's blocks to arrive. scratch_block:
    the block that padded tokens write, which no sequence has; -1 where no step is padded."""

    layers: Iterable[LayerKV]
    block_size: int
    scratch_block: int = -1


class AttentionStep(Protocol):
    """One step's attention: the state that all layers share."""

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Returns out_TND, causal attention to each row's context in this layer's cache, which holds the step's own k
        and v already. params.slopes: of q's heads."""
        ...


class ReplayableStep(Protocol):
    """A step, of heads or latents, whose calls are replayed with other lists (workers/graphs/cpu_graphs.py)."""

    def set_batch(self, batch: ForwardBatch) -> None:
        """Points the captured calls at another batch with the same replay_key, of as many tokens."""
        ...


class AttentionBackend(Protocol):
    """One way to compute attention on a device."""

    name: str

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        """Sorts the rows of a step, for all its layers. The batch must stay unchanged until the step has finished. Of a
        batch with real_T the calls depend on shapes and on whether rows are decodes, chunks or both."""
        ...

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        """Returns what the calls of a step depend on beside the number of its tokens and whether there are chunks; None
        for a step that may not be replayed. kv: the cache of the first layer. dtype: of q."""
        ...


class ListsBackend(Protocol):
    """A backend, of heads or latents, whose replayed calls read the batch's lists."""

    def prepare_replay(self, batch: ForwardBatch) -> ReplayableStep:
        """Prepares a step with a replay_key."""
        ...
