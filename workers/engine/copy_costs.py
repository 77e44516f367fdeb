"""Whether copying KV beats computing it again, from what was measured: prompt speed, copy speed, the way there.

Called by kv_offload.py with every step's and every ticket's times. Averages are exponential; before anything is
measured, copying is taken to be cheaper. Seconds everywhere.
"""

from offload.tiered_store import Kind

FOLLOW = 0.25
MIN_CHUNK = 32
"""Steps with fewer prompt tokens say nothing about prompt speed."""
FIRST_BYTES_PER_S: dict[Kind, float] = {"store": 2e9, "load": 2e9, "spill": 2e8, "fetch": 5e8}
FIRST_WAY_S = 1e-3
"""Modest guesses, until something is measured."""


class CopyCosts:
    """Averages of this group's own steps and copies. block_bytes: of a block on one rank."""

    def __init__(self, block_bytes: float) -> None:
        self.num_steps = 0
        self._token_s: float | None = None
        self._stream_s = 0.0
        self._block_s: dict[Kind, float] = {kind: block_bytes / rate for kind, rate in FIRST_BYTES_PER_S.items()}
        self._way_s: dict[Kind, float] = dict.fromkeys(FIRST_BYTES_PER_S, FIRST_WAY_S)

    def observe_step(self, prompt_tokens: int, streams: int, device_s: float) -> None:
        """One step's time; what its streams alone would have taken does not count as prompt time."""
        self.num_steps += 1
        if device_s <= 0.0:
            return
        if not prompt_tokens:
            self._stream_s = _follow(self._stream_s, device_s)
        elif prompt_tokens >= MIN_CHUNK:
            spent_s = device_s - self._stream_s if streams else device_s
            token_s = max(0.1 * device_s, spent_s) / prompt_tokens
            self._token_s = token_s if self._token_s is None else _follow(self._token_s, token_s)

    def observe_copy(
        self, kind: Kind, blocks: int, copy_s: float, elapsed_s: float, beside_steps: bool = False
    ) -> None:
        """One ticket: the bytes took copy_s, all of it elapsed_s. beside_steps: a step has ended since it began, so
        elapsed_s says how long the engine looked elsewhere, which costs nobody anything, not how long the way is.
        """
        self._block_s[kind] = _follow(self._block_s[kind], copy_s / blocks)
        if not beside_steps:
            self._way_s[kind] = _follow(self._way_s[kind], max(0.0, elapsed_s - copy_s))

    def recompute_s(self, tokens: int) -> float:
        """Computing `tokens` prompt tokens again; unknown counts as dear."""
        return float("inf") if self._token_s is None else tokens * self._token_s

    def copy_s(self, kind: Kind, blocks: int) -> float:
        """One ticket of that many blocks, there and back."""
        return self._way_s[kind] + blocks * self._block_s[kind] if blocks else 0.0


def _follow(average: float, value: float) -> float:
    return average + FOLLOW * (value - average)
