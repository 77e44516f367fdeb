"""Draft tokens of a step on one rank: asked of the proposer before the forward pass, accepted or not when its tokens
are known.

Called by model_runner.py. The model computes a row's last token and its drafts at once, and a token is sampled behind
each. A draft is accepted while it equals the token sampled in its place; the first one that does not is replaced by
that token. So the tokens are those that steps without drafts sample, whatever the temperature, as what is drawn at a
position depends on nothing but the position (sampling/philox.py). All TP ranks have the same tokens, so they propose
and accept alike. R rows of the step, S sampled tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.workers.messages.step import StepPlan
from tandem.workers.rank.row_table import RowTable
from tandem.workers.speculation.proposer import ProposalRow, Proposer

Ints = npt.NDArray[np.int64]
NOT_FINITE_ID = -1
"""Stands for a sampled token when the logits were not finite. No draft equals it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """One row's outcome: its new tokens are `count` sampled ones from place `first` of S on; num_drafts: the drafts
    that it had."""

    row: int
    first: int
    count: int
    num_drafts: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of a step. counts_R: int64, how many each row of the plan has. ids: those of each row that has any, by
    row."""

    counts_R: Ints
    ids: dict[int, list[int]]

    @property
    def total(self) -> int:
        return int(self.counts_R.sum())

    def accept(self, rows_S: Ints, ids_S: Ints) -> list[Accepted]:
        """Returns the outcome of each sampling row, in the plan's order. rows_S, ids_S: rows and sampled tokens."""
        outcomes: list[Accepted] = []
        sampled, first = ids_S.tolist(), 0
        while first < len(sampled):
            row = int(rows_S[first])
            drafts = self.ids.get(row, [])
            count = 1
            while count <= len(drafts) and drafts[count - 1] == sampled[first + count - 1]:
                count += 1
            outcomes.append(Accepted(row, first, count, len(drafts)))
            first += 1 + len(drafts)
        return outcomes


def propose(proposer: Proposer, plan: StepPlan, table: RowTable) -> Drafts | None:
    """Returns the drafts of a plan's rows, and writes them behind the rows' known tokens. None if there are none. The
    table has applied the plan and holds every token sampled so far."""
    asked = [work for work in plan.work if work.max_drafts]
    if not asked:
        return None
    rows = [ProposalRow(work.row, table.known(work.row), work.max_drafts) for work in asked]
    proposed = zip(rows, proposer.propose(rows), strict=True)
    ids = {row.row: [*drafts[: row.max_drafts]] for row, drafts in proposed if len(drafts)}
    if not ids:
        return None
    for row, drafts in ids.items():
        table.draft(row, drafts)
    counts_R = np.fromiter((len(ids.get(work.row, ())) for work in plan.work), np.int64, len(plan.work))
    return Drafts(counts_R, ids)
