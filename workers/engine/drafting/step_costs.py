"""StepCosts: what a step of decodes takes without drafts, what each draft adds to it, and what guessing takes.

Called by drafting.py. All of it is measured, by lines through the steps so far. The first line is of steps without
drafts by their rows. What a step with drafts takes beyond it is a line by drafts, and what is spent on guessing one by
the most drafts of a row, as a draft model has one pass for each. Steps with prefills are left out: what is to be saved
are steps of decodes. Seconds everywhere.
"""

import math
from typing import NamedTuple

FADE = 0.98
"""Weight of all earlier steps without drafts with each new one, and with each step in between that had drafts; in all
it is no less than DRAFT_FADE."""
DRAFT_FADE = 0.9
"""Weight of all earlier steps with drafts with each new one, so long as it has a draft for each row."""
STIFF = 0.02
"""Variance of a line's places, by the square of their mean, at which its slope is half measured and half the usual."""
ROWS_TO_DOUBLE = 16.0
"""Rows that take as long as what a step takes at least, as long as nothing tells."""
SUPPOSED = 0.03
"""Weight of the guess that a draft takes as long as one more row: a tenth of one measured step's."""
COLD = 4
"""First steps with drafts that count for no more than what is expected: what ranks run for the first time, they make
then. One such step would end drafts for hundreds of steps, as a sequence without drafts shows nothing."""
HICCUP = 3.0
"""No step counts for more than so many times what is expected: the machine did something else meanwhile."""
LEAST_S = 1e-9
"""Seconds of a step at least, should ranks measure none."""
MEASURE_EVERY = 64
"""One step in so many goes without drafts, to see what it takes."""
REACH = 0.25
"""Distance from the rows that were measured, within which the first line is believed, as a share of their mean."""


class FadingLine:
    """y by x through samples so far, the latest weighing most. Where these hardly differ in x the slope is the usual
    one: that of a line which is 0 at x = -offset. Neither slope nor value is ever below 0."""

    def __init__(self, offset: float) -> None:
        self.weight = 0.0
        self._offset = offset
        self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float, weight: float, keep: float) -> None:
        """Adds a sample; keep: what the weights of all earlier ones are multiplied by."""
        self.weight = keep * self.weight + weight
        self._x, self._y = keep * self._x + weight * x, keep * self._y + weight * y
        self._xx, self._xy = keep * self._xx + weight * x * x, keep * self._xy + weight * x * y

    def fit(self, x: float = 0.0, y: float = 0.0, weight: float = 0.0) -> tuple[float, float]:
        """(value at 0, slope) of the line through the samples and one more, if that has a weight; zeros without any."""
        total = self.weight + weight
        if not total:
            return 0.0, 0.0
        mean_x, mean_y = (self._x + weight * x) / total, (self._y + weight * y) / total
        stiff = STIFF * mean_x * mean_x
        usual = mean_y / (mean_x + self._offset)
        spread = max(0.0, (self._xx + weight * x * x) / total - mean_x * mean_x)
        both = (self._xy + weight * x * y) / total - mean_x * mean_y
        slope = max(0.0, min((both + stiff * usual) / (spread + stiff), mean_y / mean_x))
        return max(0.0, mean_y - slope * mean_x), slope

    def reaches(self, x: float) -> bool:
        """True if x is among the samples' places or near."""
        if not self.weight:
            return False
        mean = self._x / self.weight
        spread = math.sqrt(max(0.0, self._xx / self.weight - mean * mean))
        return abs(x - mean) <= REACH * mean + 2 * spread


class Prices(NamedTuple):
    """Seconds of a step with so many rows. start: what any drafts add; draft: each of them; place: of the row with most
    drafts, each of them again."""

    step: float
    start: float
    draft: float
    place: float

    def seconds(self, num_drafts: float, most: float) -> float:
        """Returns the seconds of a step with so many drafts, `most` of them of one row."""
        return self.step + (self.start + self.draft * num_drafts + self.place * most if num_drafts else 0.0)


class StepCosts:
    """The measured times of one engine's steps."""

    def __init__(self) -> None:
        self._plain, self._drafted, self._guessed = FadingLine(ROWS_TO_DOUBLE), FadingLine(0.0), FadingLine(0.0)
        self._idle_s = 0.0  # spent on guessing in steps without drafts
        self._since_plain = 0
        self._cold = COLD  # steps that are still to come

    @property
    def has_tried(self) -> bool:
        """True if a step with about as many drafts as rows has been measured."""
        return self._drafted.weight > SUPPOSED

    def knows(self, num_rows: int) -> bool:
        """Returns whether a step without drafts was measured, with about so many rows and not long ago."""
        return self._since_plain < MEASURE_EVERY and self._plain.reaches(num_rows)

    def observe(self, num_rows: int, num_drafts: int, most: int, seconds: float, draft_s: float = 0.0) -> None:
        """Adds a step of decodes alone. num_drafts: computed ones, rejected too; most: of a row, at most; draft_s: of
        its seconds, those spent on guessing."""
        if not num_rows:
            return
        if not num_drafts:
            self._observe_plain(num_rows, seconds, draft_s)
        elif self._plain.weight:
            self._since_plain += 1
            prices = self.prices(num_rows)
            seconds = min(seconds, (1.0 if self._cold else HICCUP) * prices.seconds(num_drafts, most))
            self._cold = max(0, self._cold - 1)
            draft_s = min(draft_s, seconds)
            weight = min(1.0, num_drafts / num_rows) ** 2
            keep = 1.0 - (1.0 - DRAFT_FADE) * weight
            extra_s = seconds - draft_s - (prices.step - self._idle_s)
            self._drafted.observe(num_drafts, extra_s, weight, keep)
            self._guessed.observe(most, draft_s, 1.0, DRAFT_FADE)

    def prices(self, num_rows: int) -> Prices:
        """Returns what drafts cost in a step of so many rows."""
        base_s, row_s = self._plain.fit()
        start_s, draft_s = self._drafted.fit(num_rows, num_rows * row_s, SUPPOSED)
        guess_s, place_s = self._guessed.fit()
        step_s = self._step_s(base_s, row_s, num_rows)
        return Prices(step_s, max(0.0, start_s + guess_s - self._idle_s), draft_s, place_s)

    # ---- inside ----

    def _step_s(self, base_s: float, row_s: float, num_rows: int) -> float:
        """Returns the seconds of a step without drafts, with what guessing for nothing takes."""
        return max(LEAST_S, base_s + row_s * num_rows + self._idle_s)

    def _observe_plain(self, num_rows: int, seconds: float, draft_s: float) -> None:
        if self._plain.reaches(num_rows):
            seconds = min(seconds, HICCUP * self._step_s(*self._plain.fit(), num_rows))
        draft_s = min(draft_s, seconds)
        keep = max(DRAFT_FADE, FADE ** (1 + self._since_plain))
        self._since_plain = 0
        self._idle_s += (1.0 - DRAFT_FADE) * (draft_s - self._idle_s) if self._plain.weight else draft_s
        self._plain.observe(num_rows, seconds - draft_s, 1.0, keep)
