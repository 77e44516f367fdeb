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

    def onto_latents(self, q_TND: torch.Tensor) -> torch.Tensor:
        """Return q_TNL, contiguous, whose products with latents are those of the elements that do not rotate."""
        q_TNL = torch.empty((*q_TND.shape[:2], self.spec.kv_rank), dtype=q_TND.dtype, device=q_TND.device)
        nope = self.spec.nope_dim
        torch.bmm(q_TND[..., :nope].transpose(0, 1), self.of_heads()[:, :nope], out=q_TNL.transpose(0, 1))
        return q_TNL

    def absorb(self, q_TND: torch.Tensor) -> torch.Tensor:
        """Return q_TNE, whose products with what the cache has are the scores."""
        return torch.cat((self.onto_latents(q_TND), q_TND[..., self.spec.nope_dim :]), dim=-1)

    def release(self, sums_TNL: torch.Tensor, out_TNV: torch.Tensor | None = None) -> torch.Tensor:
        """Return out_TNV of sums over latents, contiguous if it is not given."""
        if out_TNV is None:
            out_TNV = torch.empty((*sums_TNL.shape[:2], self.spec.v_dim), dtype=sums_TNL.dtype, device=sums_TNL.device)
        of_values_NLV = self.of_heads()[:, self.spec.nope_dim :].transpose(1, 2)
        torch.bmm(sums_TNL.transpose(0, 1), of_values_NLV, out=out_TNV.transpose(0, 1))
        return out_TNV

    def expand(self, latents_JE: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k_JND and v_JNV of that part of the heads."""
        spec = self.spec
        latents_JL, turned_JR = latents_JE.split((spec.kv_rank, spec.rope_dim), dim=-1)
        weight = self.of_heads()[part].flatten(0, 1)
        kv_JNX = F.linear(latents_JL, weight).unflatten(-1, (-1, spec.nope_dim + spec.v_dim))
        k_JNP, v_JNV = kv_JNX.split((spec.nope_dim, spec.v_dim), dim=-1)
        turned_JNR = turned_JR[:, None].expand(-1, k_JNP.shape[1], -1)
        return torch.cat((k_JNP, turned_JNR), dim=-1), v_JNV
