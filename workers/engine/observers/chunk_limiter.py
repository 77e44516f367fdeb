"""Limits the prefill and draft tokens of a step so that decodes keep their inter-token bound, from measured step times.

A step of n such tokens takes t(n): at least `base` (a step of decodes alone), then more with n. The smaller of two
safe estimates counts:

    slope   (bound - base) / s, s = (t - base) / n: exact while t is affine, however far below the last chunk
    growth  n * bound / t of the last chunk: t(k n) <= k t(n) for k > 1, be t affine or flat until the device is full

Averages are exponential and rise faster than they fall. Prefill chunks beside decodes are Sarathi-Serve's.
Called by the scheduler (limit) and, as an observer of steps, by the engine.
"""

from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.messages.step import StepResult

RISE = 0.5
FALL = 0.2
MARGIN = 0.9
FIRST_CHUNK = 64


class ChunkLimiter:
    """Bound of the prefill and draft tokens in a step that also has decodes; this one is the step's token budget."""

    def __init__(self, max_chunk: int) -> None:
        self._max_chunk = max_chunk

    def limit(self) -> int:
        """Returns the most such tokens for the next step."""
        return self._max_chunk


class StepChunkLimiter(ChunkLimiter, StepObserver):
    """Keeps measured steps within bound_s seconds; never below min_chunk tokens, so that prefills always advance."""

    def __init__(self, bound_s: float, min_chunk: int, max_chunk: int) -> None:
        super().__init__(max_chunk)
        self._bound_s = bound_s * MARGIN
        self._min_chunk = min(min_chunk, max_chunk)
        self._base_s: float | None = None
        self._per_token_s: float | None = None
        self._growth = float(FIRST_CHUNK)

    def limit(self) -> int:
        """Returns the most such tokens for the next step; before any measurement, a small first chunk."""
        tokens = self._growth
        if self._per_token_s:
            tokens = min(tokens, (self._bound_s - (self._base_s or 0.0)) / self._per_token_s)
        return max(self._min_chunk, min(self._max_chunk, int(tokens)))

    def returned(self, step: InFlightStep, num_drafts: int, result: StepResult) -> None:
        """Implements StepObserver."""
        self.observe(step.num_prefill_tokens + num_drafts, result.device_s)

    def observe(self, num_tokens: int, device_s: float) -> None:
        """Notes one finished step. A chunk well below the limit (a prompt's last one) counts only if it was slow."""
        if device_s <= 0.0:
            return
        if num_tokens == 0:
            self._base_s = _follow(self._base_s, device_s)
        elif 2 * num_tokens >= self.limit() or device_s > self._bound_s:
            slope_s = max(0.0, device_s - (self._base_s or 0.0)) / num_tokens
            self._per_token_s = _follow(self._per_token_s, slope_s)
            self._growth = num_tokens * self._bound_s / device_s


def _follow(average: float | None, value: float) -> float:
    if average is None:
        return value
    return average + (RISE if value > average else FALL) * (value - average)
