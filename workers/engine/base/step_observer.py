"""StepObserver: one who watches the steps of an engine and changes nothing. build_engine.py lists those in use."""

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.messages.step import StepPlan, StepResult


class StepObserver:
    """Told of each step, in the engine's thread. This one ignores all of it: an observer defines what it needs."""

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        """Called when a plan has gone to the ranks."""

    def returned(self, step: InFlightStep, num_drafts: int, result: StepResult) -> None:
        """Called when the result of a step is applied. num_drafts: places for drafts that the ranks computed beside the
        tokens of the plan. Not called for a step that the ranks could not compute."""
