"""free_drafts: engines that take drafts to cost nothing, so that they draft whatever steps take on this machine.
constant_drafts: engines that draft whatever became of earlier drafts, as guesses of random heads are never right."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.engine.drafting.step_costs import Prices, StepCosts


@contextmanager
def free_drafts() -> Iterator[None]:
    """Until the end of the block, drafts cost nothing in any engine."""
    with (
        mock.patch.object(StepCosts, "knows", return_value=True),
        mock.patch.object(StepCosts, "prices", return_value=Prices(1.0, 0.0, 0.0, 0.0)),
        mock.patch.object(StepCosts, "has_tried", True),
    ):
        yield


@contextmanager
def constant_drafts() -> Iterator[None]:
    """Until the end of the block, each row may have all of its drafts in each step."""
    with (
        mock.patch.object(Drafting, "begin_step", return_value=True),
        mock.patch.object(Drafting, "budget", lambda self, *_: self.most),
    ):
        yield
