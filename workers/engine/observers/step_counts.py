"""StepCounts: the metrics of steps, as an observer of them."""

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.stats import Collector
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.messages.step import StepPlan, StepResult


class StepCounts(StepObserver):
    """Counts steps and their tokens for metrics."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        """Implements StepObserver."""
        self.collector.steps += 1

    def returned(self, step: InFlightStep, num_drafts: int, result: StepResult) -> None:
        """Implements StepObserver."""
        self.collector.returned_steps += 1
        self.collector.returned_rows += len(step.work)
        self.collector.iteration_tokens.observe(step.num_decode + step.num_prefill_tokens + num_drafts)
