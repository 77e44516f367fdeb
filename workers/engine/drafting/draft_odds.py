"""DraftOdds: how likely a draft is to be accepted, by its place and its row, from what became of earlier ones.

Called by drafting.py. A draft counts only if all drafts before it were right: those behind a wrong one were compared
with nothing. So the number of drafts in earlier steps, which varies, does not bias the estimate. Each row has a chance
of its own, which follows its latest steps; the places' chances are the group's, relative to their mean. A new row
starts with the chance that rows had in their first steps: rows whose drafts pay have most of all drafts, so all drafts
together would promise too much.
"""

from tandem.workers.engine.base.draft_record import DraftRecord

FADE = 0.95
"""Weight of a sequence's earlier drafts with each new step."""
GROUP_FADE = 0.98
"""Weight of all earlier drafts with each new row of a step, by place and of new rows."""
BEFORE = 2.0
"""Drafts that the chance which a row had before its first ones counts for."""
FIRST = 0.5
"""Chance of a draft as long as none was compared."""
FEW = 8.0
"""Drafts that this counts for, and at each place the mean of all places."""
NEW = 12
"""Drafts of a sequence that count as those of a new one."""
LEAST, MOST = 0.01, 0.995
"""Bounds of a chance: nothing is certain for long."""


class DraftOdds:
    """Chances of one engine's drafts. most: drafts of a row in a step, at most."""

    def __init__(self, most: int) -> None:
        self.new_chance = FIRST
        self.accepted = [0] * most
        self.by_place = [1.0] * most
        """Chances by place, relative to the mean of all places."""
        self._new_tried, self._new_right = FEW, FEW * FIRST
        self._tried, self._right = [0.0] * most, [0.0] * most

    def observe(self, record: DraftRecord, num_drafts: int, num_accepted: int) -> None:
        """Counts what became of a row's drafts in a step, at least one."""
        tried = min(num_drafts, num_accepted + 1)
        if record.drafted < NEW:
            self._new_tried = GROUP_FADE * self._new_tried + tried
            self._new_right = GROUP_FADE * self._new_right + num_accepted
            self.new_chance = max(LEAST, min(MOST, self._new_right / self._new_tried))
        if record.before < 0:
            record.before = self.new_chance if record.chance < 0 else record.chance
        record.drafted += num_drafts
        record.accepted += num_accepted
        record.tried = FADE * record.tried + tried
        record.right = FADE * record.right + num_accepted
        chance = (record.right + BEFORE * record.before) / (record.tried + BEFORE)
        record.chance = max(LEAST, min(MOST, chance))
        for place in range(num_accepted):
            self.accepted[place] += 1
        self._observe_places(tried, num_accepted)

    def begin_again(self, record: DraftRecord, chance: float) -> None:
        """Has the next drafts of a sequence count for most, as they come after a pause. chance: as it is now."""
        record.tried = record.right = 0.0
        if record.drafted:
            record.before = record.chance = chance

    # ---- inside ----

    def _observe_places(self, tried: int, num_accepted: int) -> None:
        sum_tried, sum_right = 0.0, 0.0
        for place in range(len(self._tried)):
            was_tried, was_right = self._tried[place], self._right[place]
            if place < tried:
                was_tried = self._tried[place] = GROUP_FADE * was_tried + 1
                was_right = self._right[place] = GROUP_FADE * was_right + (place < num_accepted)
            sum_tried += was_tried
            sum_right += was_right
        mean = max(LEAST, sum_right / sum_tried)
        for place, was_tried in enumerate(self._tried):
            self.by_place[place] = (self._right[place] + FEW * mean) / (was_tried + FEW) / mean
