"""The products between latents and heads with one matrix, in torch.

T tokens, N query heads, P elements of a key that do not rotate and R that do, D = P + R, L of a latent, E = L + R, V of
a value.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tandem.workers.models.spec.arch import Mla


class LatentHeads:
    """The projections between latents and this rank's heads, of one layer. weight: returns their matrix,
    [N * (P + V), L], before each use: a head's rows make its key of a latent, then its value."""

    def __init__(self, spec: Mla, weight: Callable[[], torch.Tensor]) -> None:
        self.spec = spec
        self._weight = weight

    def of_heads(self) -> torch.Tensor:
        """Return the matrix, [N, P + V, L]."""
        return self._weight().unflatten(0, (-1, self.spec.nope_dim + self.spec.v_dim))

    def absorb(self, q_TND: torch.Tensor) -> torch.Tensor:
        """Return q_TNE, whose products with what the cache has are the scores."""
        nope = self.spec.nope_dim
        q_TNL = (q_TND[..., :nope].transpose(0, 1) @ self.of_heads()[:, :nope]).transpose(0, 1)
        return torch.cat((q_TNL, q_TND[..., nope:]), dim=-1)

    def release(self, out_TNL: torch.Tensor) -> torch.Tensor:
        """Return out_TNV of sums over latents."""
        of_values_NLV = self.of_heads()[:, self.spec.nope_dim :].transpose(1, 2)
        return (out_TNL.transpose(0, 1) @ of_values_NLV).transpose(0, 1)

    def expand(self, latents_JE: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k_JND and v_JNV of that part of the heads."""
        spec = self.spec
        latents_JL, turned_JR = latents_JE.split((spec.kv_rank, spec.rope_dim), dim=-1)
        weight = self.of_heads()[part].flatten(0, 1)
        kv_JNX = F.linear(latents_JL, weight).unflatten(-1, (-1, spec.nope_dim + spec.v_dim))
        k_JNP, v_JNV = kv_JNX.split((spec.nope_dim, spec.v_dim), dim=-1)
        turned_JNR = turned_JR[:, None].expand(-1, k_JNP.shape[1], -1)
        return torch.cat((k_JNP, turned_JNR), dim=-1), v_JNV
