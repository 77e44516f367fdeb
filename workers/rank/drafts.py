"""Draft tokens of a step on one rank: asked of the proposer before the forward pass, guessed on the device
(workers/platforms/tensor_rows.py), or, with several stages, named by the plan; and accepted or not when its tokens are
known.

Called by model_runner.py. The model computes a row's last token and its drafts at once, and a token is sampled behind
each. A draft is accepted while it equals the token sampled in its place; the first one that does not is replaced by
that token. So the tokens are those that steps without drafts sample, whatever the temperature, as what is drawn at a
position depends on nothing but the position (kernels/gumbel_noise.py). All TP ranks have the same tokens, so they
propose and accept alike. R rows of the step, S sampled tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tandem.offload.copies.accelerator import DeviceEvent
from tandem.workers.messages.step import StepPlan, StepResult
from tandem.workers.platforms.device_rows import NO_DRAFT
from tandem.workers.rank.drafters.step_record import ReadsSteps
from tandem.workers.rank.row_table import RowTable
from tandem.workers.speculation.proposer import EndedRow, LearnsOutputs, ProposalRow, Proposer

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accepted:
    """One row's outcome: its new tokens are `count` sampled ones from place `first` of S on; num_drafts: the drafts
    that it had; num_places: those that there was a place for."""

    row: int
    first: int
    count: int
    num_drafts: int
    num_places: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """Places for drafts in a step. counts_R: int64, how many each row of the plan has. ids: those of each row that has
    any, by row; None: the device guesses, and NO_DRAFT stands where it has not. guesses_QD: what a GuessesAhead has
    guessed there; None: the rows do it themselves."""

    counts_R: Ints
    ids: dict[int, list[int]] | None
    guesses_QD: torch.Tensor | None = None

    @property
    def total(self) -> int:
        return int(self.counts_R.sum())

    @classmethod
    def on_device(cls, plan: StepPlan, guesses_QD: torch.Tensor | None = None) -> "Drafts":
        """Return as many as the plan allows, so that their number is known before they are guessed."""
        counts_R = np.fromiter((work.max_drafts for work in plan.work), np.int64, len(plan.work))
        return cls(counts_R, None, guesses_QD)

    @classmethod
    def of_plan(cls, plan: StepPlan, table: RowTable) -> "Drafts | None":
        """Return those that the plan names, None without any, and write them behind the rows' known tokens."""
        ids = {work.row: work.draft_ids for work in plan.work if work.draft_ids}
        for row, drafts in ids.items():
            table.draft(row, drafts)
        counts_R = np.fromiter((work.max_drafts for work in plan.work), np.int64, len(plan.work))
        return cls(counts_R, ids) if ids else None


def accept(rows_S: Ints, ids_S: Ints, drafts_S: Ints) -> list[Accepted]:
    """Returns the outcome of each sampling row, in the plan's order. rows_S, ids_S: rows and sampled tokens. drafts_S:
    the draft behind each, or NO_DRAFT or NO_PLACE."""
    outcomes: list[Accepted] = []
    rows, sampled, drafts, first = rows_S.tolist(), ids_S.tolist(), drafts_S.tolist(), 0
    while first < len(rows):
        end = first + 1
        while end < len(rows) and rows[end] == rows[first]:
            end += 1
        own = drafts[first : end - 1]
        count = 1
        while count <= len(own) and own[count - 1] == sampled[first + count - 1]:
            count += 1
        guessed = own.index(NO_DRAFT) if NO_DRAFT in own else len(own)
        outcomes.append(Accepted(rows[first], first, count, guessed, len(own)))
        first = end
    return outcomes


def propose(proposer: Proposer, plan: StepPlan, table: RowTable) -> Drafts | None:
    """Returns the drafts of a plan's rows as the host proposes them, and writes them behind the rows' known tokens.
    None if there are none. The table has applied the plan and holds every token sampled so far."""
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


def learn_ended(proposer: Proposer | None, plan: StepPlan, table: RowTable, settle: Callable[[], None]) -> None:
    """Tells a proposer that learns from them which rows end with a plan, freed or bound anew, and what they have said.
    The table has rolled back but not applied the plan. settle: enters the tokens of all earlier steps, so that ranks
    tell the same whenever they learn of them; those of steps that failed never come."""
    rows = dict.fromkeys((*plan.freed_rows, *(init.row for init in plan.new_rows)))
    held = [row for row in rows if row < len(table.num_known) and table.num_known[row] > table.prompt_len[row]]
    if not held or not isinstance(proposer, LearnsOutputs):
        return
    settle()
    proposer.learn([EndedRow(table.settled(row), int(table.prompt_len[row])) for row in held])


class NextDrafts:
    """Guesses for the next steps of a step's rows, where the model is split into stages, on the rank that samples
    (decision 129): the first stage must have a step's drafts before the last one begins it. The coordinator gets them
    with the sampled tokens, and gives both to all stages in the next plan; on a device the host waits for the step. A
    proposer that keeps up with steps reads those too for which nothing is guessed.

    record: makes a timed event behind the work given to the device so far."""

    def __init__(self, proposer: Proposer, table: RowTable, record: Callable[[], DeviceEvent]) -> None:
        self._proposer, self._table, self._record = proposer, table, record
        self._reader = proposer if isinstance(proposer, ReadsSteps) else None

    def is_due(self, plan: StepPlan) -> bool:
        """Returns whether something is guessed or read when a plan's step is over."""
        return bool(plan.work) and (self._keeps_up or any(work.num_guesses for work in plan.work))

    def added(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Returns a step's result with guesses for its rows that the plan asks some for."""
        most = {work.row: work.num_guesses for work in plan.work if work.num_guesses}
        sampled = {row.row: row.token_ids for row in result.rows if row.token_ids and row.error is None}
        asked = [row for row in sampled if row in most]
        if not (asked or self._keeps_up):
            return result
        began, drafts = self._record(), dict[int, list[int]]()
        with self._table.ahead(sampled):
            if asked:
                drafts = self._guess(asked, most)
            elif self._reader is not None:
                self._reader.catch_up()
        ended = self._record()
        ended.wait()
        seconds = ended.seconds_since(began)
        rows = [msgspec.structs.replace(row, draft_ids=drafts.get(row.row, [])) for row in result.rows]
        return msgspec.structs.replace(result, rows=rows, draft_s=seconds, device_s=result.device_s + seconds)

    @property
    def _keeps_up(self) -> bool:
        return self._reader is not None and self._reader.keeps_up

    def _guess(self, asked: list[int], most: dict[int, int]) -> dict[int, list[int]]:
        """Returns the guesses of rows."""
        rows = [ProposalRow(row, self._table.known(row), most[row]) for row in asked]
        drafts = self._proposer.propose(rows)
        return {row.row: [*own[: row.max_drafts]] for row, own in zip(rows, drafts, strict=True)}
