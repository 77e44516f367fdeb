"""ShardDraw: tokens of a step that needs no whole logits. Each rank of a stage draws from its part of the vocabulary,
and the ranks tell each other of pairs: a number, and the token that it is of.

The best token is the best one of all parts. What is drawn is the argmax of exponents and noise (sampling_ops.py), each
of one token alone once the best logit is known; so it is the greatest of the parts' greatest sums, to the last bit. Of
equal ones the lower id wins, as parts ascend. Top-k and top-p count over all parts, and are not done here.
S tokens that are sampled, R ranks.
"""

from dataclasses import dataclass
from typing import Final

import torch

from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.workers.kernels.sampling_ops import FixedSampling, RandomRows

NO_ID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ShardDraw:
    """The draw of one rank. own_ids: its part of the vocabulary; vocab_size: of all parts."""

    ops: FixedSampling
    tp: StepCollectives
    own_ids: range
    vocab_size: int

    def draw(
        self, part_SV: torch.Tensor, positions_S: torch.Tensor, rows: RandomRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the greatest logit of each row, float32 [S], and its token, int64 [S], the same on all ranks.
        part_SV: float32, of own_ids. rows: as for choose_all()."""
        own_S, at_S = self.ops.best(part_SV)
        best_S, ids_S = self._greatest(pairs_of(own_S, at_S + self.own_ids.start))
        pairs_S2 = self.ops.greatest(part_SV, self.own_ids.start, best_S, positions_S, rows)
        _, drawn_S = self._greatest(pairs_S2)
        return best_S, torch.where(rows.factor() == 0, ids_S, drawn_S)

    def _greatest(self, pairs_S2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the greatest number of all ranks for each row, NaN if one is, and its token."""
        parts_RS2 = pairs_S2.new_empty((self.tp.size, *pairs_S2.shape))
        self.tp.all_gather(parts_RS2, pairs_S2)
        numbers_RS, ids_RS = parts_RS2.view(torch.float32)[..., 0], parts_RS2[..., 1]
        greatest_S = numbers_RS.amax(0)
        ids_S = torch.where(numbers_RS == greatest_S, ids_RS, NO_ID).amin(0)
        return greatest_S, ids_S.clamp(max=self.vocab_size - 1).long()


def pairs_of(numbers_S: torch.Tensor, ids_S: torch.Tensor) -> torch.Tensor:
    """Returns numbers' bits and tokens side by side, int32 [S, 2]."""
    return torch.stack((numbers_S.view(torch.int32), ids_S.int()), 1)
