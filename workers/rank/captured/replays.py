"""Replays: which capture a step of this rank replays, and SampledPlaces, what is read behind it. Called by
model_runner.py. T tokens, S tokens that are sampled, G groups of layers.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.graphs.graph_runner import StartGraphs, StepReplay
from tandem.workers.rank.captured.framed_step import FramedStep, ReplayOutcome
from tandem.workers.rank.captured.ruled_draw import DrawReplay


@dataclass(slots=True)
class Replays:
    """The captures of a rank, and the one that the step under way replays. graphs: None until they are made. draws_of:
    those of draws with rules, by the number of their tokens. samples: on this rank."""

    samples: bool
    graphs: StartGraphs | None = None
    draws_of: dict[int, DrawReplay] = field(default_factory=dict)
    now: StepReplay | None = None

    def choose(self, make_shape: Callable[[], StepShape], key_of: Callable[[StepShape], Hashable | None]) -> None:
        """Finds the capture of a step, on every rank of a stage alike. key_of: as StartGraphs.find takes it."""
        self.now = None
        if self.graphs is None or not self.graphs.can_replay:
            return
        shape = make_shape()
        for given in dict.fromkeys((shape, shape._replace(by_shards=False))):
            for own in (given, given._replace(most_queries=DECODE_QUERIES + 1)):  # what takes chunks takes any step
                self.now = self.now or self.graphs.find(key_of(own), shape.num_tokens)

    @property
    def step(self) -> FramedStep | None:
        """The captured step."""
        if self.now is None:
            return None
        assert isinstance(self.now.step, FramedStep)
        return self.now.step

    @property
    def ruled(self) -> DrawReplay | None:
        """The draw with rules that may follow it."""
        return None if self.step is None else self.draws_of.get(self.step.num_samples)

    def run(self, step: FramedStep, hidden_TH: torch.Tensor | None) -> None:
        """Replays it. hidden_TH: the previous stage's output."""
        assert self.now is not None and self.graphs is not None
        if hidden_TH is not None:
            step.room.residual_TH[: len(hidden_TH)] = hidden_TH
        self.now.replay()
        self.graphs.num_replays += 1

    def draws(self, count: int, *, behind: bool) -> bool:
        """Returns whether the replay draws the step's tokens, so many. behind: they are drawn behind it."""
        return self.step is not None and self.step.draws and self.samples and count > 0 and not behind

    def places(self, count: int, *, has_drafts: bool) -> "SampledPlaces":
        """Returns what the replay leaves of so many tokens that are sampled."""
        assert self.now is not None and self.step is not None
        outcome = ReplayOutcome(*self.now.outputs)
        drafts_S = outcome.drafts_S[:count] if has_drafts else None
        if drafts_S is not None:
            self.step.expect_drafts(drafts_S)
        return SampledPlaces(drafts_S, None, outcome, count)


@dataclass(frozen=True, slots=True)
class SampledPlaces:
    """The tokens of a step that was replayed, or of an eager one, from its inputs. drafts_S: as in StepTensors, None
    for a step without drafts."""

    drafts_S: torch.Tensor | None
    forward: ForwardBatch | None = None
    outcome: ReplayOutcome | None = None
    count: int = 0

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
