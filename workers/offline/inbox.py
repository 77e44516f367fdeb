"""OfflineInbox: the Inbox of LLM's engine loop. Nothing arrives in it but aborts of the sink's own and a Ctrl-C."""

import signal
import threading
import time
from typing import Any

from tandem.workers.engine.engine import Engine
from tandem.workers.messages.request import Abort

WAIT_S = 0.001


class OfflineInbox:
    """Delays a Ctrl-C until the turn ends, so that the engine stays usable; a second one interrupts at once.

    Used as a context manager around one EngineLoop.run(). stops: aborts for the engine, appended by its sink.
    has_cut: a second Ctrl-C has interrupted something in the middle, so that engine and rank may disagree.
    """

    def __init__(self, stops: list[Abort]) -> None:
        self._stops = stops
        self._noted = False
        self.has_cut = False
        self._before: Any = None

    def __enter__(self) -> "OfflineInbox":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def take(self, engine: Engine) -> None:
        """Applies the aborts. KeyboardInterrupt after a Ctrl-C."""
        while self._stops:
            engine.abort(self._stops.pop(0))
        self.check()

    def wait(self, timeout_s: float | None) -> None:
        """Waits a moment: only ranks, which the engine itself listens to, may have news."""
        time.sleep(WAIT_S if timeout_s else 0.0)

    def check(self) -> None:
        """KeyboardInterrupt after a Ctrl-C."""
        if self._noted:
            raise KeyboardInterrupt

    def _note(self, *_: object) -> None:
        if self._noted:
            self.has_cut = True
            raise KeyboardInterrupt
        self._noted = True
