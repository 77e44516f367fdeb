"""Drafting: how many draft tokens a sequence may have in its next step, from what became of earlier ones.

Called by the scheduler and the result applier, and an observer of steps. A draft costs the time of one more token in a
step; each one accepted saves a step's share of one token. So a sequence drafts while the share that is accepted, times
a step's time for each token that it yields, exceeds the time of a token more. What is accepted is counted for each
sequence; both times come from a line through the steps measured so far: those without prefill, or as long as none was
measured, those with one. Steps of one size show no line. Then it drafts while a fair share is accepted, and some steps
go without drafts, so that there is another size. A sequence whose drafts do not pay stops, and tries again after a
pause that doubles. The ranks decide what is guessed, and may guess fewer (speculation/proposer.py).
"""

from dataclasses import dataclass
from typing import Annotated

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.metric_rows import Metric
from tandem.workers.engine.base.sequence import DraftRecord
from tandem.workers.engine.base.step_observer import StepObserver

FORGET = 0.98
"""Weight of all earlier steps in the measured line, with each new one."""
AGAIN_DRAFTS, AGAIN_ACCEPTED = 4.0, 1.0
"""Drafts, and accepted ones, that count after a pause (as DraftRecord's before a sequence has any)."""
OLDER = 0.9
"""Weight of a sequence's earlier drafts with each new step."""
EMPTY_STEPS, LONGEST_EMPTY_PAUSE = 4, 16
"""Steps without a guess before a pause, and the longest such pause in output tokens."""
BLIND_ACCEPTANCE = 0.2
"""The share of drafts that must be accepted as long as no line of step times is known."""
LEAST_ACCEPTANCE = 0.05
"""The same at any step times: a guess takes time on the ranks that no step shows."""
FLAT = 0.005
"""Variance of the steps' sizes, by the square of their mean, below which their times show no line."""
PROBE_EVERY = 8
"""While they show none, one step in so many goes without drafts."""
HICCUP = 3.0
"""No step counts for more than so many times what the line says: the machine did something else meanwhile."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024
"""Output tokens without drafts after they have not paid."""


@dataclass(frozen=True)
class DraftStats:
    """Counts from the start, frozen. The first draft of a row has position 0."""

    num_drafts: Annotated[int, Metric("counter", "spec_decode_num_drafts_total", "Rows of steps that had drafts.")]
    num_draft_tokens: Annotated[int, Metric("counter", "spec_decode_num_draft_tokens_total", "Draft tokens.")]
    num_accepted: Annotated[
        int, Metric("counter", "spec_decode_num_accepted_tokens_total", "Draft tokens that were accepted.")
    ]
    accepted_per_position: Annotated[
        tuple[int, ...],
        Metric(
            "counter",
            "spec_decode_num_accepted_tokens_per_pos_total",
            "Draft tokens that were accepted, by place.",
            "position",
        ),
    ]


class StepLine:
    """Seconds of a step by its number of tokens: the line a + b * tokens through steps measured so far, the latest
    ones weighing most."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Adds a step."""
        if self.is_known and (expected_s := self.seconds(num_tokens)[0]) > 0:
            seconds = min(seconds, HICCUP * expected_s)
        x, y = float(num_tokens), seconds
        self._count, self._x, self._y = FORGET * self._count + 1, FORGET * self._x + x, FORGET * self._y + y
        self._xx, self._xy = FORGET * self._xx + x * x, FORGET * self._xy + x * y

    @property
    def is_known(self) -> bool:
        """True if steps of different sizes have been measured, not too long ago."""
        if not self._count:
            return False
        mean = self._x / self._count
        return self._xx / self._count - mean * mean > FLAT * mean * mean

    def seconds(self, num_tokens: int) -> tuple[float, float]:
        """(seconds of a step of so many tokens, seconds of one token more), none below 0; for a line that is known."""
        mean_x, mean_y = self._x / self._count, self._y / self._count
        slope = (self._xy / self._count - mean_x * mean_y) / (self._xx / self._count - mean_x * mean_x)
        slope = max(0.0, slope)
        return max(0.0, mean_y + slope * (num_tokens - mean_x)), slope


class Drafting(StepObserver):
    """The draft budgets of one engine. most: drafts of a row in a step, at most."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._num_drafts = self._num_draft_tokens = 0
        self._accepted = [0] * most
        self._num_steps = 0
        self._decodes, self._mixed = StepLine(), StepLine()

    def budget(self, record: DraftRecord, num_tokens: int, num_rows: int) -> int:
        """Returns how many drafts a sequence may have in the next step. num_tokens: its own so far; num_rows: rows that
        run."""
        if num_tokens < record.resume_at:
            return 0
        if self._pays(record, num_rows):
            return 0 if self._probes() else self.most
        record.pause = min(max(FIRST_PAUSE, 2 * record.pause), LONGEST_PAUSE)
        record.resume_at = num_tokens + record.pause
        record.num_drafts, record.num_accepted = AGAIN_DRAFTS, AGAIN_ACCEPTED
        return 0

    def observe(self, record: DraftRecord, num_drafts: int, num_accepted: int) -> None:
        """Counts what became of a row's drafts in a step."""
        if not num_drafts:
            return
        record.num_empty = 0
        record.drafted += num_drafts
        record.accepted += num_accepted
        record.num_drafts = OLDER * record.num_drafts + num_drafts
        record.num_accepted = OLDER * record.num_accepted + num_accepted
        if num_accepted == num_drafts:
            record.pause = 0
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for position in range(num_accepted):
            self._accepted[position] += 1

    def observe_none(self, record: DraftRecord, num_tokens: int) -> None:
        """Notes that nothing was guessed for a sequence of num_tokens tokens: a budget for nothing holds blocks, and on
        a GPU its tokens are computed. After some such steps it pauses shortly, the longer the more there were."""
        record.num_empty += 1
        if record.num_empty >= EMPTY_STEPS:
            record.resume_at = num_tokens + min(record.num_empty, LONGEST_EMPTY_PAUSE)

    def stats(self) -> DraftStats:
        """Returns a frozen copy of all counts."""
        return DraftStats(self._num_drafts, self._num_draft_tokens, sum(self._accepted), tuple(self._accepted))

    def returned(self, step: InFlightStep, num_drafts: int, device_s: float) -> None:
        """Implements StepObserver."""
        self.observe_step(step.num_decode + step.num_prefill_tokens + num_drafts, step.num_prefill_tokens, device_s)

    def observe_step(self, num_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        """Adds a step. num_tokens: computed ones, with those of prefills and rejected drafts."""
        self._num_steps += 1
        (self._mixed if num_prefill_tokens else self._decodes).observe(num_tokens, seconds)

    def step_seconds(self, num_tokens: int) -> tuple[float, float] | None:
        """(seconds of a step of so many tokens, of one token more) by the measured line; None if none is known."""
        line = next((line for line in (self._decodes, self._mixed) if line.is_known), None)
        return None if line is None else line.seconds(num_tokens)

    # ---- inside ----

    def _pays(self, record: DraftRecord, num_rows: int) -> bool:
        """Return whether drafts of this sequence save more time than they take, as far as is known."""
        times = self.step_seconds(num_rows)
        if times is None:
            return record.acceptance >= BLIND_ACCEPTANCE
        step_s, token_s = times
        return record.acceptance >= LEAST_ACCEPTANCE and record.acceptance * step_s >= token_s * num_rows

    def _probes(self) -> bool:
        """Return whether the next step goes without drafts, to be of another size than the last ones."""
        return self._num_steps % PROBE_EVERY == PROBE_EVERY - 1 and self.step_seconds(1) is None
