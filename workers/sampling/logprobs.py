"""Log probabilities of chosen and best tokens, from the model's own logits before any adjustment.

Called by sampler.py; the same choice as vLLM's `raw_logprobs`. L rows that want them, V vocabulary.
"""

from dataclasses import dataclass

import torch

from workers.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-softmax of some rows' raw logits and their best ids, kept from before the logits are changed in place."""

    logprobs_LV: torch.Tensor
    wanted: list[int]

    @classmethod
    def of(cls, logits_LV: torch.Tensor, wanted: list[int]) -> "RawLogprobs":
        """logits_LV: float32, one row per entry of `wanted`, which counts the best tokens to report (0: none)."""
        return cls(torch.log_softmax(logits_LV, dim=-1), wanted)

    def of_tokens(self, chosen_L: torch.Tensor) -> list[TokenLogprobs]:
        """One TokenLogprobs per row for the chosen ids (int64 [L]); `top` in descending order."""
        most = min(max(self.wanted, default=0), self.logprobs_LV.shape[1])
        chosen = self.logprobs_LV.gather(1, chosen_L[:, None])[:, 0].tolist()
        top = self.logprobs_LV.topk(most, dim=1)
        rows = zip(chosen_L.tolist(), chosen, top.indices.tolist(), top.values.tolist(), self.wanted, strict=True)
        return [
            TokenLogprobs(token_id=token, logprob=logprob, top=list(zip(ids[:count], values[:count], strict=True)))
            for token, logprob, ids, values, count in rows
        ]
