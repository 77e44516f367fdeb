"""InFlightStep: one plan that the ranks have not answered yet, with the sequences whose work it holds."""

from dataclasses import dataclass, field

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.messages.step import RowInit, RowWork, StepPlan, StepResult


@dataclass(slots=True, eq=False)
class InFlightStep:
    """One plan and its sequences: sequences[i] owns work[i]."""

    step_id: int
    sequences: list[Sequence] = field(default_factory=list)
    work: list[RowWork] = field(default_factory=list)
    new_rows: list[RowInit] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    admitted: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences that got their first row, and how many of their tokens were found in the prefix cache."""
    awaits: list[int] = field(default_factory=list)
    num_decode: int = 0
    num_drafts: int = 0  # the most that its rows may have together
    most_drafts: int = 0  # the most that one of them may have
    num_guesses: int = 0  # tokens that may be guessed for the rows' next steps (PP > 1)
    num_prefill_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the ranks compute at most."""
        return self.num_decode + self.num_drafts + self.num_prefill_tokens

    def num_computed_drafts(self, result: StepResult) -> int:
        """Returns in how many places for drafts the ranks computed something, guessed or not."""
        if not self.num_drafts:
            return 0
        return sum(row.num_drafts for row in result.rows) + result.num_unguessed

    def guessed(self, num_drafts: int, result: StepResult) -> tuple[int, int]:
        """Returns how many tokens the ranks were asked to guess in this step, and how many they have guessed.
        num_drafts: of num_computed_drafts."""
        if self.num_guesses:
            return self.num_guesses, sum(len(row.draft_ids) for row in result.rows)
        return self.num_drafts, num_drafts

    def plan(self, freed_rows: list[int], known_failure: int, rolled_back: list[tuple[int, int, int]]) -> StepPlan:
        """Returns the plan for the ranks."""
        return StepPlan(
            step_id=self.step_id,
            work=self.work,
            new_rows=self.new_rows,
            freed_rows=freed_rows,
            block_copies=self.block_copies,
            awaits=self.awaits,
            known_failure=known_failure,
            rolled_back=rolled_back,
        )
