"""StepRecord: what the last step has left, for heads that go on from it, by row.

A step's tensors last until the next one, in which its rows may have been freed, rolled back, or may have had drafts
rejected: what counts of a row is what the row table says has been computed.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from tandem.workers.models.decoder import Heard
from tandem.workers.rank.drafters.guess_draw import DraftRows
from tandem.workers.speculation.proposer import Proposer

Ints = npt.NDArray[np.int64]


class DecodedStep(NamedTuple):
    """A step that the model has computed on this rank. rows_R, begin_R: its rows and the first position of each;
    starts: int64 [R + 1], their places among the step's tokens; heard: of these, until the next step."""

    rows_R: npt.NDArray[np.int64]
    begin_R: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    heard: Heard


@runtime_checkable
class ReadsSteps(Proposer, Protocol):
    """A proposer that goes on from what the model has computed. Of each step one of propose() and catch_up() is called,
    then read()."""

    def read(self, step: DecodedStep) -> None:
        """Takes what a step has left."""
        ...

    def catch_up(self) -> None:
        """Does what propose() does, in a step without drafts."""
        ...


class Computed(NamedTuple):
    """Rows whose tokens from begin_R to before end_R the last step has computed for good; first_R: where the first of
    these is among the step's tokens."""

    rows_R: Ints
    begin_R: Ints
    end_R: Ints
    first_R: Ints


class StepRecord:
    """The last step of a rank. table: its rows."""

    def __init__(self, table: DraftRows) -> None:
        self._table = table
        self._step: DecodedStep | None = None
        self._lives_R = np.empty(0, np.int64)

    def keep(self, step: DecodedStep) -> None:
        self._step, self._lives_R = step, self._table.lives[step.rows_R].copy()

    def take(self) -> tuple[Computed, Heard] | None:
        """Returns what is kept, once; None where nothing is left of it."""
        step, self._step = self._step, None
        if step is None:
            return None
        table, rows_R = self._table, step.rows_R
        lens_R = np.diff(step.starts)
        begin_R = step.begin_R.copy()
        # drafts that were accepted ahead of the step have moved it; the host counts them when they are known
        end_R = np.minimum(table.num_computed[rows_R], begin_R + lens_R)
        alive = np.flatnonzero((table.lives[rows_R] == self._lives_R) & (end_R > begin_R))
        if not len(alive):
            return None
        return Computed(rows_R[alive], begin_R[alive], end_R[alive], step.starts[:-1][alive]), step.heard
