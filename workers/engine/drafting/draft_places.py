"""DraftPlaces: how many drafts each row has in the step that is planned, and how many are guessed for its next one.

Called by the scheduler. In a group with one stage the ranks guess when a step begins, so its plan names a number. With
more stages only the last one can guess, and the others must know the drafts when the step begins: they are guessed at
the end of the row's step before, come with its result, and go to all stages in the next plan (decision 129).
"""

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.drafting.drafting import Drafting

NONE = 0, 0
"""The places of a row that has no drafts, and for which nothing is guessed."""


class DraftPlaces:
    """The places in a group with one stage. In a step: begin_step, then of() for its rows that decode."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting

    def begin_step(self, num_rows: int) -> bool:
        """Decides for a step in which num_rows rows decode. Returns whether any of them may have drafts or guesses."""
        return num_rows > 0 and self._drafting.begin_step(num_rows)

    def of(self, seq: Sequence, most: int) -> tuple[int, int]:
        """Returns how many drafts a sequence may have in the step, up to `most`, and how many tokens are guessed for
        its next one. None comes behind its last token."""
        return self._budget(seq, min(most, seq.max_len - seq.num_known - seq.num_drafts - 1)), 0

    def _budget(self, seq: Sequence, most: int) -> int:
        return min(most, self._drafting.budget(seq.drafting, seq.num_known)) if most > 0 else 0


class PlacesAhead(DraftPlaces):
    """The places in a group with several stages: rows have the drafts that were guessed for them, and the budget is of
    what is guessed for their next steps. No plan that names a sequence is in flight, so its guesses are behind its
    tokens."""

    _asks = False

    def begin_step(self, num_rows: int) -> bool:
        self._asks = super().begin_step(num_rows)
        return True

    def of(self, seq: Sequence, most: int) -> tuple[int, int]:
        left = seq.max_len - seq.num_known - 1
        num_drafts = max(0, min(most, left, len(seq.guesses)))
        return num_drafts, self._budget(seq, left - num_drafts - 1) if self._asks else 0


def draft_places(drafting: Drafting | None, *, relay: bool) -> DraftPlaces | None:
    """Returns the places of a group, None without speculative decoding. relay: it has several stages."""
    if drafting is None:
        return None
    return PlacesAhead(drafting) if relay else DraftPlaces(drafting)
