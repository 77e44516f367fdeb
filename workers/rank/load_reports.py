"""LoadReports: what a rank says while it reads its weights. Called by rank_worker.py for each parameter read.

Two messages a second at most, so that a model of thousands of small tensors costs no more than one of few.
"""

import time
from collections.abc import Callable

from workers.messages import RankLoading

PERIOD_S = 0.5


class LoadReports:
    """Sends the first word, the last, and between them what is news after PERIOD_S."""

    def __init__(
        self, rank: int, send: Callable[[RankLoading], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank = rank
        self._send = send
        self._clock = clock
        self._sent_s: float | None = None

    def take(self, loaded_bytes: int, total_bytes: int) -> None:
        now_s = self._clock()
        if self._sent_s is None or loaded_bytes == total_bytes or now_s - self._sent_s >= PERIOD_S:
            self._sent_s = now_s
            self._send(RankLoading(self._rank, loaded_bytes, total_bytes))
