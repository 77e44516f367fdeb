"""Estimates of the seconds to copy KV and to compute it again, from measured prefill and copy times.

Called by kv_offload.py with every ticket's times; observes the steps. Averages are exponential; before anything is
measured, copying is taken to be cheaper. Seconds everywhere.
"""

from tandem.offload.kv.tiered_store import Kind
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.step_observer import StepObserver
from tandem.workers.messages.step import StepResult

FOLLOW = 0.25
MIN_CHUNK = 32
"""Steps with fewer prefill tokens are not used to measure prefill speed."""
FIRST_BYTES_PER_S: dict[Kind, float] = {"store": 2e9, "load": 2e9, "spill": 2e8, "fetch": 5e8}
SHARE_BLOCKS = 64
"""Blocks of a load in copy_share()."""
FIRST_LATENCY_S = 1e-3
"""Modest guesses, until something is measured."""


class CopyCosts(StepObserver):
    """Averages of this group's own steps and copies. block_bytes: of a block on one rank."""

    def __init__(self, block_bytes: float) -> None:
        self.num_steps = 0
        self._token_s: float | None = None
        self._decode_s = 0.0
        self._has_loaded = False
        self._block_s: dict[Kind, float] = {kind: block_bytes / rate for kind, rate in FIRST_BYTES_PER_S.items()}
        self._latency_s: dict[Kind, float] = dict.fromkeys(FIRST_BYTES_PER_S, FIRST_LATENCY_S)

    def returned(self, step: InFlightStep, num_drafts: int, result: StepResult) -> None:
        """Implements StepObserver."""
        self.observe_step(step.num_prefill_tokens, step.num_decode, result.device_s)

    def observe_step(self, prefill_tokens: int, decodes: int, device_s: float) -> None:
        """Notes one step's time; the part that its decodes alone would take does not count as prefill time."""
        self.num_steps += 1
        if device_s <= 0.0:
            return
        if not prefill_tokens:
            self._decode_s = _follow(self._decode_s, device_s)
        elif prefill_tokens >= MIN_CHUNK:
            spent_s = device_s - self._decode_s if decodes else device_s
            token_s = max(0.1 * device_s, spent_s) / prefill_tokens
            self._token_s = token_s if self._token_s is None else _follow(self._token_s, token_s)

    def observe_copy(
        self, kind: Kind, blocks: int, copy_s: float, elapsed_s: float, beside_steps: bool = False
    ) -> None:
        """Notes one ticket: the copy took copy_s, the ticket elapsed_s. beside_steps: a step has ended since it began,
        so elapsed_s includes the time until the engine looked, and is not a measure of latency.
        """
        self._has_loaded = self._has_loaded or kind == "load"
        self._block_s[kind] = _follow(self._block_s[kind], copy_s / blocks)
        if not beside_steps:
            self._latency_s[kind] = _follow(self._latency_s[kind], max(0.0, elapsed_s - copy_s))

    def recompute_s(self, tokens: int) -> float:
        """Returns the seconds to compute `tokens` tokens again; inf before any measurement."""
        return float("inf") if self._token_s is None else tokens * self._token_s

    def copy_s(self, kind: Kind, blocks: int) -> float:
        """Returns the seconds of one ticket of that many blocks, its latency included."""
        return self._latency_s[kind] + blocks * self._block_s[kind] if blocks else 0.0

    def copy_share(self, block_size: int) -> float | None:
        """Returns the seconds to load a long prompt's KV over the seconds to compute it; None before both were
        measured. block_size: tokens of a block."""
        if self._token_s is None or not self._has_loaded:
            return None
        return self.copy_s("load", SHARE_BLOCKS) / self.recompute_s(SHARE_BLOCKS * block_size)


def _follow(average: float, value: float) -> float:
    return average + FOLLOW * (value - average)
