"""The Protocol of attention over latents (DeepSeek-V2, 2024): a token's one cached vector stands for the keys and
values of all heads.

A model has layers of heads or of latents (Mla), so its decoder has an AttentionBackend or a
LatentBackend; both live by the rules of attention/backend.py. T tokens, J context positions, N query heads, P elements
of a key that do not rotate and R that do, D = P + R, L of a latent, E = L + R of the cache, V of a value.
"""

from collections.abc import Hashable
from typing import Protocol

import torch

from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class LatentStep(Protocol):
    """One step's attention of layers whose cache has latents: the state that all layers share."""

    def attend_latent(
        self,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        """Return out_TNV, causal attention to each row's context in this layer's cache, which holds the step's own
        latents already."""
        ...


class LatentBackend(Protocol):
    """One way to compute attention over latents on a device. Its members are those of AttentionBackend, but for what
    the steps attend to."""

    name: str

    def prepare(self, batch: ForwardBatch) -> LatentStep: ...

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None: ...
