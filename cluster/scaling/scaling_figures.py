"""Figures of a group for the choice of the number of groups (cluster/scaling/decide.py): its load of now, and its
rates and first tokens of the last half minute, from counts of the engine that only grow, without work for idle rows.
Pure but for the clock.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from itertools import pairwise, repeat
from operator import sub
from typing import NamedTuple

from tandem.cluster.scaling.decide import FIGURES, LATE_BOUNDS_S, WINDOW_S
from tandem.workers.engine.base.stats import TTFT_BOUNDS_S, EngineStats

SAMPLE_S = 0.9
"""Between two samples at least: who asks, asks once a second."""
KEPT = 0.95
"""Share of what is known of the speed of prompts that stays with each second in which some waited."""
PLACES = tuple(bisect_left(TTFT_BOUNDS_S, bound) for bound in LATE_BOUNDS_S)
assert [TTFT_BOUNDS_S[place] for place in PLACES] == list(LATE_BOUNDS_S), "bounds of the engine's histogram"


class _Sample(NamedTuple):
    at_s: float
    prompt_tokens: int
    running: int
    is_queued: bool
    first_tokens: tuple[int, ...]  # by bound of the histogram, from the start


class ScalingFigures:
    """The figures of one group. rows: the most sequences that run at a time. One thread."""

    def __init__(self, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rows = rows
        self._clock = clock
        self._served_s: float | None = None
        self._samples: deque[_Sample] = deque()
        self._queued_tokens, self._queued_s = 0.0, 0.0

    def read(self, stats: EngineStats | None) -> dict[str, float]:
        """Returns the figures of now, by the names of FIGURES. stats: the engine's last ones; None before there are
        any, as long as nothing has happened."""
        now_s = self._clock()
        if self._served_s is None:
            self._served_s = now_s
        values = dict.fromkeys(FIGURES, 0.0) | {"rows": float(self._rows), "age_s": now_s - self._served_s}
        if stats is None:
            return values
        self._sample(stats, now_s)
        first, last = self._samples[0], self._samples[-1]
        came = [b - a for a, b in zip(first.first_tokens, last.first_tokens, strict=True)]
        total = sum(came)
        late = {
            f"late_{bound:g}": sum(came[place + 1 :]) / max(1, total)
            for bound, place in zip(LATE_BOUNDS_S, PLACES, strict=True)
        }
        return (
            values
            | late
            | {
                "waiting": float(stats.waiting - stats.idle.waiting),
                "queued_tokens": float(stats.waiting_tokens - stats.idle.waiting_tokens),
                "running": float(stats.running - stats.idle.running),
                "mean_running": sum(sample.running for sample in self._samples) / len(self._samples),
                "kv_used": max(0.0, stats.kv_usage - stats.idle.kv_usage),
                "prompt_rate": (last.prompt_tokens - first.prompt_tokens) / max(1.0, last.at_s - first.at_s),
                "prefill_rate": self._prefill_rate(is_queued=last.is_queued),
                "steps": float(stats.steps),
                "first_tokens": float(total),
                "idle_work": float(stats.idle.running + stats.idle.waiting),
            }
        )

    def _prefill_rate(self, *, is_queued: bool) -> float:
        """Returns how fast prompts go. In a queue: as fast as it gets shorter, be it for prompts or for rows that are
        taken. Without one that may be of other work than now, so the best second counts too."""
        if not self._queued_s:
            return 0.0
        rate = max(1.0, self._queued_tokens / self._queued_s)
        return rate if is_queued else max(rate, *(self._rate(a, b) for a, b in pairwise(self._samples)), 0.0)

    @staticmethod
    def _rate(before: _Sample, after: _Sample) -> float:
        return (after.prompt_tokens - before.prompt_tokens) / (after.at_s - before.at_s)

    def _sample(self, stats: EngineStats, now_s: float) -> None:
        """Notes what has been counted by now, and how fast prompts went since the last sample if some waited."""
        idle = stats.idle
        counts = tuple(map(sub, stats.time_to_first_token_s.counts, idle.first_tokens or repeat(0)))
        prompt_tokens, running = stats.prompt_tokens - idle.prompt_tokens, stats.running - idle.running
        sample = _Sample(now_s, prompt_tokens, running, stats.waiting > idle.waiting, counts)
        if self._samples and now_s - self._samples[-1].at_s < SAMPLE_S:
            return
        if self._samples and self._samples[-1].is_queued and sample.is_queued:
            before = self._samples[-1]
            tokens, seconds = sample.prompt_tokens - before.prompt_tokens, now_s - before.at_s
            kept = KEPT**seconds
            self._queued_tokens = kept * self._queued_tokens + tokens
            self._queued_s = kept * self._queued_s + seconds
        self._samples.append(sample)
        while now_s - self._samples[0].at_s > WINDOW_S:
            self._samples.popleft()
