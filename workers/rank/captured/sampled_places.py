"""SampledPlaces: what is read of a step, behind the model, about the tokens that it samples. S such tokens, G groups of
layers."""

from dataclasses import dataclass

import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.rank.captured.framed_step import ReplayOutcome


@dataclass(frozen=True, slots=True)
class SampledPlaces:
    """The tokens of a step that was replayed, or of an eager one, from its inputs. drafts_S: as in StepTensors, None
    for a step without drafts."""

    drafts_S: torch.Tensor | None
    forward: ForwardBatch | None = None
    outcome: ReplayOutcome | None = None
    count: int = 0

    @classmethod
    def of_replay(cls, outcome: ReplayOutcome, count: int, *, has_drafts: bool) -> "SampledPlaces":
        return cls(outcome.drafts_S[:count] if has_drafts else None, None, outcome, count)

    def positions_S(self) -> torch.Tensor:
        """Returns the index of each token in its row, int64."""
        if self.outcome is not None:
            return self.outcome.positions_S[: self.count]
        assert self.forward is not None
        return self.forward.positions_T[self.forward.logits_rows_S] + 1

    def slots_GS(self) -> torch.Tensor:
        """Returns the slots of the tokens whose logits they are drawn from, int64."""
        if self.outcome is not None:
            return self.outcome.slots_GS[:, : self.count]
        forward = self.forward
        assert forward is not None
        groups = [forward.of_group(group) for group in range(forward.num_groups)]
        return torch.stack([group.slot_mapping_T[forward.logits_rows_S] for group in groups])
