"""Drafting: how many draft tokens each sequence has in a step: as many as bring the most tokens a second.

Called by the scheduler and the result applier, and an observer of steps. A draft brings a token with the chance that it
and all before it are right (draft_odds.py), and takes time (step_costs.py): its own, one pass of a draft model for each
place, and what any drafts add to a step. A step is best if each draft brings more than the best rate would bring in the
draft's own time (fractional programming: Dinkelbach, 1967). That rate is followed from step to step, and chances fall
from place to place, so that a row takes places up to the first that brings too little, and the step as many places as
pay for all rows together.

What does not pay is tried again now and then: of one sequence ever more rarely, and of all so rarely that it takes a
small share of the time. Nothing here reads a clock or draws numbers: the same plans and results give the same drafts.
The ranks decide what is guessed, and may guess fewer (speculation/proposer.py).
"""

from tandem.workers.engine.base.draft_record import DraftRecord, DraftStats
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.engine.drafting.draft_odds import MOST, DraftOdds
from tandem.workers.engine.drafting.step_costs import Prices, StepCosts
from tandem.workers.messages.step import StepResult

LEAST_GAIN = 0.03
"""Tokens that a draft must bring whatever it costs: places for it are taken, and no measurement is exact."""
PROBE_DRAFTS = 2
"""Drafts of a sequence whose drafts do not pay, when it tries them again."""
PROBE_SHARE = 0.01
"""Share of the steps' time that such tries may take, of all sequences together."""
PROBE_STEP = 0.25
"""Share of one step's time that is saved up for them before they are made: several in one step, so that it shows."""
FIRST_PAUSE, LONGEST_PAUSE = 16, 1024
"""Output tokens from one such try of a sequence to the next; they double."""
ASK_EVERY = 8
"""Steps: where no drafts pay, costs are compared, and sequences asked what theirs would bring, once in so many steps:
a small model's step takes a millisecond, and such a look a hundredth of it."""
EMPTY_STEPS, LONGEST_EMPTY_PAUSE = 4, 16
"""Steps without a guess before a pause, and the longest such pause in output tokens."""
GUESS_FADE = 0.95
"""Weight of earlier steps with each new one in the share of the drafts allowed that are guessed."""


class Drafting(StepObserver):
    """The draft budgets of one engine. most: drafts of a row in a step, at most. In a step: begin_step, then budget for
    each of its rows that decode."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.costs = StepCosts()
        self._odds = DraftOdds(most)
        self._num_drafts = self._num_draft_tokens = 0
        self._allowed = self._guessed = 1.0  # drafts, with weights that fade
        self._gain = [0.0] * most  # by place, tokens that drafts there would bring, of all rows last asked
        self._rows = [0] * most  # by place, rows for which one there pays
        self._unasked = ASK_EVERY  # steps since
        self._rate = 0.0  # tokens a second, at best
        self._least = 1.0  # tokens that a draft has to bring in this step
        self._places = 0  # the most drafts of a row in this step
        self._saved_s = 0.0  # for tries
        self._tries = 0  # that this step may have
        self._try_s = self._first_try_s = 0.0  # what one takes, and the first one beside that

    # ---- in a step ----

    def begin_step(self, num_rows: int) -> bool:
        """Decides for a step in which num_rows rows run. Returns whether any of them may have drafts."""
        self._unasked += 1
        if (not (self._places or self._tries) and self._unasked < ASK_EVERY) or not self.costs.knows(num_rows):
            return False
        prices = self.costs.prices(num_rows)
        self._rate = max(self._rate, num_rows / prices.step)
        self._least = max(LEAST_GAIN, self._rate * prices.draft)
        self._places = max(self._places_of_all(num_rows, prices), self._places_of_new(prices))
        if not self.costs.has_tried:
            self._places = min(self._places, 1)
        self._save(num_rows, prices)
        self._unasked = 0
        for place in range(self.most):
            self._gain[place], self._rows[place] = 0.0, 0
        return True

    def budget(self, record: DraftRecord, num_tokens: int) -> int:
        """Returns how many drafts a sequence may have in the step that has begun. num_tokens: its own so far."""
        if num_tokens < record.ask_at:
            return 0
        chance = self._odds.new_chance if record.chance < 0 else record.chance
        gain, least, count = 1.0, self._least, 0
        for relative in self._odds.by_place:
            gain *= min(MOST, chance * relative)
            if gain <= least:
                break
            self._gain[count] += gain
            self._rows[count] += 1
            count += 1
        return min(count, self._places) or self._try(record, num_tokens, chance)

    # ---- what became of it ----

    def observe(self, record: DraftRecord, num_drafts: int, num_accepted: int) -> None:
        """Counts what became of a row's drafts in a step."""
        if not num_drafts:
            return
        record.num_empty = 0
        self._odds.observe(record, num_drafts, num_accepted)
        if record.pause and record.chance > self._least:
            record.pause //= 2
        elif num_accepted == num_drafts:
            record.try_at = 0
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts

    def observe_none(self, record: DraftRecord, num_tokens: int) -> None:
        """Notes that nothing was guessed for a sequence of num_tokens tokens: a budget for nothing holds blocks, and on
        a GPU its tokens are computed. After some such steps it pauses shortly, the longer the more there were."""
        record.num_empty += 1
        if record.num_empty >= EMPTY_STEPS:
            record.ask_at = num_tokens + min(record.num_empty, LONGEST_EMPTY_PAUSE)

    def stats(self) -> DraftStats:
        """Returns a frozen copy of all counts."""
        accepted = tuple(self._odds.accepted)
        return DraftStats(self._num_drafts, self._num_draft_tokens, sum(accepted), accepted)

    def returned(self, step: InFlightStep, num_drafts: int, result: StepResult) -> None:
        """Implements StepObserver."""
        self._saved_s += PROBE_SHARE * result.device_s
        allowed, guessed = step.guessed(num_drafts, result)
        if allowed:
            self._allowed = GUESS_FADE * self._allowed + allowed
            self._guessed = GUESS_FADE * self._guessed + guessed
        if not step.num_prefill_tokens:
            seconds, draft_s = result.device_s, result.draft_s
            if step.num_guesses and not num_drafts:  # they are the next step's
                seconds, draft_s = seconds - draft_s, 0.0
            self.costs.observe(step.num_decode, num_drafts, step.most_drafts, seconds, draft_s)

    # ---- inside ----

    def _places_of_all(self, num_rows: int, prices: Prices) -> int:
        """Returns how many places pay for the rows last asked together, and follows the rate."""
        rate, guessed = self._rate, self._guessed / self._allowed
        net, places, tokens, drafts = -rate * prices.start, 0, 0.0, 0.0
        for gain, rows in zip(self._gain, self._rows, strict=True):
            more = guessed * (gain - rows * rate * prices.draft) - rate * prices.place
            if more <= 0:
                break
            net, places, tokens, drafts = net + more, places + 1, tokens + guessed * gain, drafts + guessed * rows
        plain = num_rows / prices.step
        if net <= 0:
            self._rate = plain
            return 0
        self._rate = max(plain, (num_rows + tokens) / prices.seconds(drafts, places))
        return places

    def _places_of_new(self, prices: Prices) -> int:
        """Returns how many places pay for a new sequence alone."""
        net, places, gain = -self._rate * prices.start, 0, 1.0
        cost = self._rate * (prices.draft + prices.place)
        for relative in self._odds.by_place:
            gain *= min(MOST, self._odds.new_chance * relative)
            if gain <= max(LEAST_GAIN, cost):
                break
            net, places = net + gain - cost, places + 1
        return places if net > 0 else 0

    def _save(self, num_rows: int, prices: Prices) -> None:
        """Allows tries in this step if enough is saved up."""
        self._tries, self._try_s = 0, PROBE_DRAFTS * prices.draft
        self._first_try_s = 0.0 if self._places else prices.start + PROBE_DRAFTS * prices.place
        left_s = max(0.0, PROBE_STEP * prices.step - self._first_try_s - self._try_s)
        enough_s = left_s + self._first_try_s + self._try_s
        if self._saved_s >= enough_s:
            self._saved_s = enough_s
            self._tries = 1 + (int(left_s / self._try_s) if self._try_s else num_rows)

    def _try(self, record: DraftRecord, num_tokens: int, chance: float) -> int:
        """Returns the drafts of a sequence whose drafts do not pay, so that it is seen when they do."""
        if not record.pause:
            record.pause = FIRST_PAUSE
            record.try_at = num_tokens + FIRST_PAUSE
            self._odds.begin_again(record, chance)
            return 0
        if num_tokens < record.try_at or not self._tries:
            return 0
        self._tries -= 1
        self._saved_s -= self._try_s + self._first_try_s
        self._first_try_s = 0.0
        record.pause = min(2 * record.pause, LONGEST_PAUSE)
        record.try_at = num_tokens + record.pause
        return min(PROBE_DRAFTS, self.most)
