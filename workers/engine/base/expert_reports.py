"""Loads of experts: when the engine asks the ranks for them, and what they have said.

The layers count while they sort tokens by expert (workers/kernels/expert_ops.py). Owned by the engine's thread.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.metric_rows import Metric
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.messages.step import ExpertTokens, StepPlan

PERIOD_S: Final = 5.0
"""Seconds between two questions: an answer waits for the device, and 100 layers of 128 experts are 40 KB of it."""


@dataclass(frozen=True)
class ExpertStats:
    """Loads of experts since the start: a number for each expert and for each layer, not for each expert of each layer,
    which would be thousands of samples."""

    tokens: Annotated[
        list[int], Metric("counter", "expert_tokens_total", "Tokens that experts got, added over layers.", "expert")
    ]
    imbalance: Annotated[
        dict[int, float],
        Metric(
            "gauge", "expert_imbalance", "Tokens of a layer's busiest expert over the mean of its experts.", "layer"
        ),
    ]

    @classmethod
    def of(cls, tokens_of_layers: dict[int, list[int]]) -> "ExpertStats":
        """tokens_of_layers: of each expert, by layer."""
        imbalance = {
            layer: max(tokens) * len(tokens) / max(1, sum(tokens)) for layer, tokens in tokens_of_layers.items()
        }
        return cls([sum(each) for each in zip(*tokens_of_layers.values(), strict=True)], imbalance)


class ExpertReports(StepObserver):
    """ask: asks the ranks, of which one on each stage answers.

    stats: what is known; None before all stages have answered."""

    def __init__(self, ask: Callable[[], None], num_stages: int, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._num_stages = num_stages
        self._clock = clock
        self._next_s = -math.inf
        self._is_stale = False
        self._num_open = 0
        self._by_layer: dict[int, list[int]] = {}
        self.stats: ExpertStats | None = None

    @property
    def is_open(self) -> bool:
        """True while answers are due."""
        return self._num_open > 0

    @property
    def look_again_s(self) -> float:
        """The moment of the clock at which to call poll() although there are no steps; inf: never."""
        return self._next_s if self._is_stale else math.inf

    def submitted(self, step: InFlightStep, plan: StepPlan) -> None:
        """Implements StepObserver: what is known will be out of date."""
        self._is_stale = True

    def poll(self) -> None:
        """Asks, if there were steps since the last time and that is PERIOD_S ago."""
        if self._is_stale and not self._num_open and (now_s := self._clock()) >= self._next_s:
            self._is_stale, self._num_open, self._next_s = False, self._num_stages, now_s + PERIOD_S
            self._ask()

    def take(self, report: ExpertTokens) -> None:
        """Takes a stage's answer."""
        self._by_layer |= report.by_layer
        self._num_open -= 1
        if not self.is_open and self._by_layer:
            self.stats = ExpertStats.of(dict(sorted(self._by_layer.items())))
