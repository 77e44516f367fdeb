"""How many prompt tokens a step may carry so that streams keep their inter-token bound, from measured step times.

A step's time is modelled as base + per_token * prompt tokens: `base` is followed by steps without prompt tokens,
`per_token` by those with them. Both are exponential moving averages that rise faster than they fall, for the bound is
on the slow side. Chunked prompts beside decoding rows are Sarathi-Serve's; the size from measurement is ours.
Called by the scheduler (limit) and by whoever applies results (observe).
"""

from typing import Protocol

RISE = 0.5
FALL = 0.1
MARGIN = 0.9
FIRST_CHUNK = 256


class Pacer(Protocol):
    """Bounds the prompt tokens of a step that also serves streams."""

    def limit(self) -> int: ...

    def observe(self, prompt_tokens: int, decode_tokens: int, device_s: float) -> None: ...


class StepPacer:
    """Keeps measured steps within bound_s seconds; never below min_chunk tokens, so that prompts always advance."""

    def __init__(self, bound_s: float, min_chunk: int, max_chunk: int) -> None:
        self._bound_s = bound_s * MARGIN
        self._min_chunk = min_chunk
        self._max_chunk = max_chunk
        self._base_s: float | None = None
        self._per_token_s: float | None = None

    def limit(self) -> int:
        """Prompt tokens for the next step. Before anything is measured: a small first chunk."""
        if not self._per_token_s:
            return max(self._min_chunk, min(FIRST_CHUNK, self._max_chunk))
        room_s = self._bound_s - (self._base_s or 0.0)
        return max(self._min_chunk, min(self._max_chunk, int(room_s / self._per_token_s)))

    def observe(self, prompt_tokens: int, decode_tokens: int, device_s: float) -> None:
        """One finished step. Steps without measured time, and tiny chunks that say little of the slope, are skipped."""
        if device_s <= 0.0:
            return
        if prompt_tokens == 0:
            self._base_s = _follow(self._base_s, device_s)
        elif prompt_tokens >= self._min_chunk:
            base_s = (self._base_s or 0.0) if decode_tokens else 0.0
            self._per_token_s = _follow(self._per_token_s, max(0.0, device_s - base_s) / prompt_tokens)


class NoPacer:
    """Without an inter-token bound the token budget alone limits a step."""

    def __init__(self, max_chunk: int) -> None:
        self._max_chunk = max_chunk

    def limit(self) -> int:
        return self._max_chunk

    def observe(self, prompt_tokens: int, decode_tokens: int, device_s: float) -> None:
        """Measures nothing."""


def _follow(average: float | None, value: float) -> float:
    if average is None:
        return value
    return average + (RISE if value > average else FALL) * (value - average)
