"""The search of ngram.py on a device, for several rows at once, in shapes that depend on no value: nothing is read
back.

Called by workers/platforms/tensor_rows.py. Q rows, L positions that are looked at, D drafts.
"""

import torch

from tandem.configs.schema import SpeculativeSettings
from tandem.workers.platforms.device_rows import NO_DRAFT


class NgramOnDevice:
    """The Guess of method "ngram": gives what NgramProposer gives."""

    def __init__(self, settings: SpeculativeSettings) -> None:
        self._shortest, self._longest = settings.lookup_range

    def __call__(
        self, tokens_QL: torch.Tensor, num_known_Q: torch.Tensor, most_Q: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        last_Q1 = num_known_Q[:, None] - 1
        position_L = torch.arange(tokens_QL.shape[1], device=tokens_QL.device)
        length_QL = self._lengths(tokens_QL, last_Q1, position_L)
        best_Q1 = length_QL.amax(1, keepdim=True)
        ends_QL = (length_QL == best_Q1) & (best_Q1 >= self._shortest)
        whole_QL = ends_QL & (position_L + most_Q[:, None] <= last_Q1)
        latest_Q1 = torch.where(whole_QL, position_L, -1).amax(1, keepdim=True)
        earliest_Q1 = torch.where(ends_QL, position_L, len(position_L)).amin(1, keepdim=True)
        end_Q1 = torch.where(latest_Q1 >= 0, latest_Q1, earliest_Q1)
        place_D = torch.arange(num_drafts, device=tokens_QL.device)
        at_QD = end_Q1 + 1 + place_D
        found_QD = (at_QD <= last_Q1) & (place_D < most_Q[:, None])
        ids_QD = tokens_QL.gather(1, at_QD.clamp(max=len(position_L) - 1)).long()
        return torch.where(found_QD, ids_QD, NO_DRAFT)

    def _lengths(self, tokens_QL: torch.Tensor, last_Q1: torch.Tensor, position_L: torch.Tensor) -> torch.Tensor:
        """Returns how many of a row's last tokens, at most the longest that counts, occur up to each earlier position:
        int64 [Q, L]."""
        same_QL = position_L < last_Q1
        length_QL = torch.zeros_like(tokens_QL, dtype=torch.int64)
        for back in range(self._longest):
            wanted_Q1 = tokens_QL.gather(1, (last_Q1 - back).clamp(min=0))
            same_QL = same_QL & (position_L >= back)
            same_QL &= tokens_QL.roll(back, 1) == wanted_Q1
            length_QL += same_QL
        return length_QL
