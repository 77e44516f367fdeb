"""How many prompt tokens a step may carry so that streams keep their inter-token bound, from measured step times.

A step of n prompt tokens takes t(n): at least `base` (what a step of streams alone takes), then more with n. Two
estimates, both on the safe side, and the smaller one counts:

    slope   (bound - base) / s, s = (t - base) / n: exact while t is affine, however far below the last chunk
    growth  n * bound / t of the last chunk: t(k n) <= k t(n) for k > 1, be t affine or flat until the device is full

Averages are exponential and rise faster than they fall. Prompt chunks beside decoding rows are Sarathi-Serve's.
Called by the scheduler (limit) and by the engine after each result (observe).
"""

from typing import Protocol

RISE = 0.5
FALL = 0.2
MARGIN = 0.9
FIRST_CHUNK = 64


class Pacer(Protocol):
    """Bounds the prompt tokens of a step that also serves streams."""

    def limit(self) -> int: ...

    def observe(self, prompt_tokens: int, device_s: float) -> None: ...


class StepPacer:
    """Keeps measured steps within bound_s seconds; never below min_chunk tokens, so that prompts always advance."""

    def __init__(self, bound_s: float, min_chunk: int, max_chunk: int) -> None:
        self._bound_s = bound_s * MARGIN
        self._min_chunk = min(min_chunk, max_chunk)
        self._max_chunk = max_chunk
        self._base_s: float | None = None
        self._per_token_s: float | None = None
        self._growth = float(FIRST_CHUNK)

    def limit(self) -> int:
        """Prompt tokens for the next step. Before anything is measured: a small first chunk."""
        tokens = self._growth
        if self._per_token_s:
            tokens = min(tokens, (self._bound_s - (self._base_s or 0.0)) / self._per_token_s)
        return max(self._min_chunk, min(self._max_chunk, int(tokens)))

    def observe(self, prompt_tokens: int, device_s: float) -> None:
        """One finished step. A chunk well below the limit (a prompt's last one) says little, unless it was slow."""
        if device_s <= 0.0:
            return
        if prompt_tokens == 0:
            self._base_s = _follow(self._base_s, device_s)
        elif 2 * prompt_tokens >= self.limit() or device_s > self._bound_s:
            slope_s = max(0.0, device_s - (self._base_s or 0.0)) / prompt_tokens
            self._per_token_s = _follow(self._per_token_s, slope_s)
            self._growth = prompt_tokens * self._bound_s / device_s


class NoPacer:
    """Without an inter-token bound the token budget alone limits a step."""

    def __init__(self, max_chunk: int) -> None:
        self._max_chunk = max_chunk

    def limit(self) -> int:
        return self._max_chunk

    def observe(self, prompt_tokens: int, device_s: float) -> None:
        """Measures nothing."""


def _follow(average: float | None, value: float) -> float:
    if average is None:
        return value
    return average + (RISE if value > average else FALL) * (value - average)
