"""Are the ranks frozen? The coordinator's half of the pulse: a thread probes every rank twice a second. Torch-free.

Owned by workers/rank_group.py. The rank's half (workers/rank/pulse_echo.py) sends each probe back from C, without the
interpreter lock, so it answers while Python or torch computes for minutes, and falls silent only when the whole process
is stopped or its machine cannot be reached. Says nothing about progress: that is step_bound.py.
docs/decisions/004-step-progress.md says why there are two.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from workers.channel import bind_router
from workers.running_clock import RunningClock

log = logging.getLogger(__name__)

PERIOD_S = 0.5
FROZEN_AFTER_S = 5.0
DOUBTFUL_AFTER_S = 2.0
OnSilent = Callable[[str], None]


class Silence:
    """For how long each rank has said nothing, in time that this process ran. A rank counts from its first word."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = RunningClock(clock, longest_turn_s=2 * PERIOD_S)
        self._heard_s: dict[bytes, float] = {}

    def turn(self) -> None:
        """Time passes; call it before hear(), so that what waited unread counts as said now."""
        self._clock.turn()

    def hear(self, name: bytes) -> None:
        self._heard_s[name] = self._clock.now_s

    def ranks(self) -> list[bytes]:
        """Those that were ever heard."""
        return list(self._heard_s)

    def longest(self) -> tuple[float, bytes]:
        """The longest silence in seconds, and whose; 0 before the first word."""
        now_s = self._clock.now_s
        return max(((now_s - heard_s, name) for name, heard_s in self._heard_s.items()), default=(0.0, b""))


class PulseWatch:
    """Probes from its creation until `context` is terminated or a rank is found frozen.

    on_silent(message) is called once, on the watching thread. `verdict` and silent_s() may be read from any thread.
    """

    def __init__(
        self, context: "zmq.Context[Any]", secret: str, host: str, on_silent: OnSilent, after_s: float = FROZEN_AFTER_S
    ) -> None:
        self._socket, self.endpoint = bind_router(context, secret, host)
        self._on_silent = on_silent
        self._after_s = after_s
        self._silence = Silence()
        self._silent_s = 0.0
        self.verdict: str | None = None
        threading.Thread(target=self._watch, name="tandem-pulse", daemon=True).start()

    def silent_s(self) -> float:
        """The longest silence of a rank; 0 while it is within what a busy machine explains."""
        return self._silent_s if self._silent_s >= DOUBTFUL_AFTER_S else 0.0

    def _watch(self) -> None:
        message: str | None = None
        try:
            while message is None:
                message = self._turn()
        except zmq.ContextTerminated:
            return
        except Exception as error:
            log.exception("the ranks' pulse is no longer watched")
            message = f"the ranks' pulse can no longer be watched: {error}"
        finally:
            self._socket.close(linger=0)
        try:
            self._on_silent(message)  # first: who reads the verdict may end this process
        finally:
            self.verdict = message

    def _turn(self) -> str | None:
        """Probes all, listens for a period, judges: what to say of a rank that is frozen."""
        for name in self._silence.ranks():
            try:
                self._socket.send_multipart([name, b"?"], zmq.DONTWAIT)
            except zmq.ContextTerminated:
                raise
            except zmq.ZMQError:
                continue  # not connected any more: its silence counts
        self._listen(PERIOD_S)
        self._silence.turn()
        self._listen(0.0)
        self._silent_s, name = self._silence.longest()
        if self._silent_s <= self._after_s:
            return None
        return (
            f"rank {name.decode()} has given no sign of life for {self._silent_s:.0f} s: "
            "it is stopped, or its machine cannot be reached"
        )

    def _listen(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while self._socket.poll(max(0, round((deadline_s - time.monotonic()) * 1000))):
            self._silence.hear(self._socket.recv_multipart(zmq.NOBLOCK)[0])
