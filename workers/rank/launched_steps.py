"""LaunchedSteps: steps that this rank has launched and whose tokens its row table lacks, and what became of them.

Used by model_runner.py. Steps settle in order: their tokens enter the row table, and on the rank that samples the
coordinator gets a StepResult. S rows that sample.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tandem.offload.copies.accelerator import DeviceEvent
from tandem.workers.messages.step import RowResult, StepPlan, StepResult
from tandem.workers.platforms.device_rows import NOT_FINITE_ID
from tandem.workers.rank.batch import StepBatch
from tandem.workers.rank.drafts import Accepted, Drafts, accept
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.pooler import Pooled
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.step_exchanges import StepVerdict
from tandem.workers.sampling.prompt_logprobs import Scored
from tandem.workers.sampling.sampler import Drawn, Sampled

Ints = npt.NDArray[np.int64]
OUT_OF_MEMORY = "device out of memory"


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The sampled tokens of a step on the way to the row table: the rows that sample and those rows' lives; the ids on
    the device; where they and the drafts behind them arrive on the host. is_clean: what rejected drafts have left in
    the cache harms nobody."""

    rows: Ints
    lives: Ints
    ids_S: torch.Tensor
    host_ids_S: torch.Tensor
    host_drafts_S: torch.Tensor | None
    is_clean: bool = False


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step's work on the device."""

    batch: StepBatch
    drafts: Drafts | None = None
    drawn: Drawn | None = None
    tokens: StepTokens | None = None
    # events around the wait for hidden states, where there was one
    received: tuple[DeviceEvent, DeviceEvent] | None = None
    errors: dict[int, str] = field(default_factory=dict)  # of its rows, by row
    verdict: StepVerdict | None = None  # of all ranks, on the last stage of several
    is_replayed: bool = False
    pooled: Pooled | None = None  # its embeddings
    scored: Scored | None = None  # the log probabilities of its prompts
    guessing: tuple[DeviceEvent, DeviceEvent] | None = None  # events around what a proposer has done
    host_drafts_S: torch.Tensor | None = None  # as of StepTokens, which ranks of several stages get in a later plan
    behind_drafts: dict[int, str] = field(default_factory=dict)  # why places fail behind drafts (GrammarMask)


class StepHandle:
    """A step that was launched. Made by LaunchedSteps. done: an event behind its work on the device."""

    __slots__ = (
        "_steps",
        "began",
        "done",
        "failure",
        "known_failure",
        "settled",
        "step_id",
        "step_result",
        "work",
    )

    def __init__(
        self,
        steps: "LaunchedSteps",
        plan: StepPlan,
        began: DeviceEvent,
        done: DeviceEvent,
        work: StepWork | None,
        failure: str | None,
    ) -> None:
        self._steps = steps
        self.step_id = plan.step_id
        self.known_failure = plan.known_failure
        self.began = began
        self.done = done
        self.work = work
        self.failure = failure
        self.settled = False
        self.step_result: StepResult | None = None

    def is_done(self) -> bool:
        """Returns whether `result` would not wait."""
        return self.settled or self.done.is_done()

    def result(self) -> StepResult | None:
        """Waits until the device has run the step, sampled or not; None where this rank does not sample."""
        if not self.settled:
            self._steps.settle(self)
        return self.step_result


class LaunchedSteps:
    """The steps of one rank from their launch until they settle. samples: whether this rank does. record: makes a timed
    event behind the work given to the device so far."""

    def __init__(self, table: RowTable, kv: KVCache, *, samples: bool, record: Callable[[], DeviceEvent]) -> None:
        self._table = table
        self._kv = kv
        self._samples = samples
        self._record = record
        self._waiting: deque[StepHandle] = deque()
        self._failed_step = -1
        self._last_done = record()

    def add(self, plan: StepPlan, began: DeviceEvent, work: StepWork | None, failure: str | None) -> StepHandle:
        """Returns the handle of a step that was launched just now, behind `began`; settled where the device is done."""
        step = StepHandle(self, plan, began, self._record(), work, failure)
        self._waiting.append(step)
        if step.done.is_done():
            self.settle(step)
        return step

    def amend(self, step: StepHandle, added: Callable[[StepResult], StepResult]) -> None:
        """Waits for the newest step, and has its result, unless it failed, be what is added to it."""
        result = step.result()
        if result is not None and result.failure is None:
            step.step_result = added(result)
            self._last_done = self._record()

    def settle(self, last: StepHandle) -> None:
        """Waits for all steps up to `last`, enters their tokens into the row table and makes their results."""
        while not last.settled:
            step = self._waiting[0]
            step.done.wait()
            self._waiting.popleft()
            step.settled = True
            self._settle_one(step)

    def settle_all(self) -> None:
        """Settles every step launched so far."""
        if self._waiting:
            self.settle(self._waiting[-1])

    def clear(self) -> None:
        """Forgets the steps that have not settled."""
        self._waiting.clear()

    def fail(self, step_id: int) -> None:
        """Notes that this rank has not computed a step."""
        self._failed_step = step_id

    def void(self, step_id: int, known_failure: int) -> str | None:
        """Returns why a plan counts for nothing: it was made before the engine knew of a failed step ahead of it."""
        if not known_failure < self._failed_step < step_id:
            return None
        return f"planned before the failure of step {self._failed_step} was known"

    def _settle_one(self, step: StepHandle) -> None:
        work, step.work = step.work, None
        received_s, draft_s, num_unguessed, is_replayed = 0.0, 0.0, 0, False
        rows: list[RowResult] = []
        if work is not None:
            step.failure, is_replayed = self._failure_of(step, work), work.is_replayed
            if step.failure is None:
                rows = self._take(work)
                if work.drafts is not None:
                    num_unguessed = work.drafts.total - sum(row.num_drafts for row in rows)
                if work.pooled is not None:
                    rows = work.pooled.merged(rows, work.errors)
                if work.scored is not None:
                    rows = work.scored.merged(rows)
            if work.received is not None:
                received_s = work.received[1].seconds_since(work.received[0])
            if work.guessing is not None:
                draft_s = work.guessing[1].seconds_since(work.guessing[0])
        if self._samples:
            step.step_result = StepResult(
                step_id=step.step_id,
                rows=rows,
                failure=step.failure,
                num_unguessed=num_unguessed,
                is_replayed=is_replayed,
                draft_s=draft_s,
                device_s=step.done.seconds_since(step.began) - received_s,
                wait_s=max(0.0, step.began.seconds_since(self._last_done)) + received_s,
            )
        self._last_done = step.done

    def _failure_of(self, step: StepHandle, work: StepWork) -> str | None:
        """Returns why a step that this rank has computed counts for nothing, as far as it can know: a peer has failed,
        or the step was planned before an earlier one's failure was known."""
        failure = self.void(step.step_id, step.known_failure)
        if failure is None and work.verdict is not None and work.verdict.is_failed:
            self._failed_step = step.step_id
            failure = f"{OUT_OF_MEMORY} in step {step.step_id}, on another rank of the group"
        return failure

    def _take(self, work: StepWork) -> list[RowResult]:
        """Enters a step's tokens into the row table; returns the rows' results where this rank samples."""
        rows_S, accepted, tokens = work.batch.sample_rows_S, None, work.tokens
        if tokens is not None:
            if tokens.host_drafts_S is None:
                self._fill(tokens)
            else:
                accepted = accept(rows_S, tokens.host_ids_S.numpy(), tokens.host_drafts_S.numpy())
                self._fill_accepted(tokens, accepted)
        if work.drawn is None:
            return []
        if tokens is None and work.host_drafts_S is not None:
            accepted = accept(rows_S, work.drawn.host_ids_S.numpy(), work.host_drafts_S.numpy())
        sampled = work.drawn.collect()
        sampled.reasons.update(work.behind_drafts)
        return _row_results(rows_S.tolist(), sampled, work.errors, accepted)

    def _fill(self, tokens: StepTokens) -> None:
        """Enters a step's tokens, but for rows that meanwhile belong to other sequences."""
        ids = np.maximum(tokens.host_ids_S.numpy(), 0)  # of a failed row -1 in a capture with drafts
        live = np.flatnonzero(self._table.lives[tokens.rows] == tokens.lives)
        self._table.fill(tokens.rows[live], ids[live])

    def _fill_accepted(self, tokens: StepTokens, accepted: list[Accepted]) -> None:
        """Enters the tokens of a step with drafts."""
        ids = tokens.host_ids_S.tolist()
        is_live = (self._table.lives[tokens.rows] == tokens.lives).tolist()
        for row, live in zip(accepted, is_live, strict=True):
            if not live:
                continue
            own = ids[row.first : row.first + row.count]
            rejected = self._table.accept(row.row, [max(0, token) for token in own], row.num_places)
            if not tokens.is_clean and NOT_FINITE_ID in ids[row.first : row.first + row.num_places + 1]:
                self._kv.clear_slots(rejected)  # attention may read what it then weighs with 0


def _row_results(
    rows_S: Sequence[int], sampled: Sampled, errors: Mapping[int, str], accepted: Sequence[Accepted] | None
) -> list[RowResult]:
    """Returns one RowResult for each sampling row, in the plan's order. rows_S: the row of each sampled token. errors:
    why rows have no token, by row. accepted: the outcome of each row; None: of a step without drafts."""
    if accepted is not None:
        return [_result_of(outcome, sampled, errors) for outcome in accepted]
    if any(sampled.failed) or errors:
        singles = (Accepted(row, place, 1, 0, 0) for place, row in enumerate(rows_S))
        return [_result_of(single, sampled, errors) for single in singles]
    return [
        RowResult(row=row, token_ids=[token], logprobs=None if entry is None else [entry])
        for row, token, entry in zip(rows_S, sampled.token_ids, sampled.logprobs, strict=True)
    ]


def _result_of(outcome: Accepted, sampled: Sampled, errors: Mapping[int, str]) -> RowResult:
    """The tokens up to the first that could not be sampled, and why."""
    own = slice(outcome.first, outcome.first + outcome.count)
    error = errors.get(outcome.row)
    if error is not None:
        return RowResult(row=outcome.row, token_ids=[], error=error, num_drafts=outcome.num_drafts)
    if any(sampled.failed[own]):
        own = slice(own.start, sampled.failed.index(True, own.start))
        error = sampled.reasons[own.stop]
    entries = [entry for entry in sampled.logprobs[own] if entry is not None]
    return RowResult(
        row=outcome.row,
        token_ids=sampled.token_ids[own],
        logprobs=entries or None,
        error=error,
        num_drafts=outcome.num_drafts,
    )
