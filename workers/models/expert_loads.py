"""ExpertLoads: how many tokens each expert of a stage's layers has got, for the metrics.

The layers count while they sort tokens by expert (workers/kernels/expert_ops.py); this reads the counts now and then.
"""

import time
from collections.abc import Callable, Mapping

import torch

PERIOD_S = 5.0
"""Seconds between two readings: reading waits for the device, and 100 layers of 128 experts are 40 KB of a message."""


class ExpertLoads:
    """The counts of one rank. counters: by layer, int64 [experts]; since ranks of a stage route alike, all experts'."""

    def __init__(self, counters: Mapping[int, torch.Tensor], clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._next_s = 0.0

    def clear(self) -> None:
        """Forgets what has been counted, such as the tokens of a warm-up."""
        for counter in self._counters.values():
            counter.zero_()

    def due(self) -> dict[int, list[int]] | None:
        """Returns the counts since the start, by layer; None if the last reading is younger than PERIOD_S, or the stage
        has no experts."""
        if not self._counters or self._clock() < self._next_s:
            return None
        self._next_s = self._clock() + PERIOD_S
        return {layer: counter.tolist() for layer, counter in self._counters.items()}
