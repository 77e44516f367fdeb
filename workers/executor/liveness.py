"""Detects frozen ranks. Torch-free. Ranks that live and make no progress are step_watch.py's.

Owned by rank_group.py. ProbeWatch probes every rank twice a second; rank_watch.py answers without the interpreter lock,
so a rank is silent only when its process is stopped or its machine cannot be reached. RunningClock leaves out the time
in which this process was itself stopped. docs/decisions/004-step-progress.md says why there are two signals.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from tandem.configs.limits import ANY_PORTS, Ports
from tandem.workers.engine.base.running_clock import RunningClock
from tandem.workers.messages.channel import bind_router

log = logging.getLogger(__name__)

PERIOD_S = 0.5
FROZEN_AFTER_S = 5.0
DOUBTFUL_AFTER_S = 2.0
OnSilent = Callable[[str], None]


class ProbeSilence:
    """Seconds since each rank last answered, in time that this process ran. A rank counts from its first answer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = RunningClock(clock, longest_tick_s=2 * PERIOD_S)
        self._answered_s: dict[bytes, float] = {}

    def tick(self) -> None:
        """Advances the clock; call it before answered(), so that answers that waited unread count as of now."""
        self._clock.tick()

    def answered(self, name: bytes) -> None:
        self._answered_s[name] = self._clock.now_s

    def ranks(self) -> list[bytes]:
        """Returns the ranks that have ever answered."""
        return list(self._answered_s)

    def longest(self) -> tuple[float, bytes]:
        """Returns the longest silence in seconds and its rank; 0 before the first answer."""
        now_s = self._clock.now_s
        return max(((now_s - answered_s, name) for name, answered_s in self._answered_s.items()), default=(0.0, b""))


class ProbeWatch:
    """Probes from its creation until `context` is terminated or a rank is found frozen.

    on_silent(message) is called once, on the watching thread. silent_s() may be read from any thread.
    """

    def __init__(
        self,
        context: "zmq.Context[Any]",
        secret: str,
        host: str,
        on_silent: OnSilent,
        after_s: float = FROZEN_AFTER_S,
        ports: Ports = ANY_PORTS,
    ) -> None:
        self._socket, self.endpoint = bind_router(context, secret, host, ports)
        self._on_silent = on_silent
        self._after_s = after_s
        self._silence = ProbeSilence()
        self._silent_s = 0.0
        threading.Thread(target=self._watch, name="tandem-probes", daemon=True).start()

    def silent_s(self) -> float:
        """The longest silence of a rank; 0 while it is within what a busy machine explains."""
        return self._silent_s if self._silent_s >= DOUBTFUL_AFTER_S else 0.0

    def _watch(self) -> None:
        message: str | None = None
        try:
            while message is None:
                message = self._probe_once()
        except zmq.ContextTerminated:
            return
        except Exception as error:
            log.exception("ranks are no longer probed")
            message = f"ranks can no longer be probed: {error}"
        finally:
            self._socket.close(linger=0)
        self._on_silent(message)

    def _probe_once(self) -> str | None:
        """Probes all ranks and listens for a period; returns a message about a frozen rank, or None."""
        for name in self._silence.ranks():
            try:
                self._socket.send_multipart([name, b"?"], zmq.DONTWAIT)
            except zmq.ContextTerminated:
                raise
            except zmq.ZMQError:
                continue  # not connected any more: its silence counts
        self._listen(PERIOD_S)
        self._silence.tick()
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
            self._silence.answered(self._socket.recv_multipart(zmq.NOBLOCK)[0])
