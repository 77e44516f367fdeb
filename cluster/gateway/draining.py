"""Whether this gateway still takes work, and how many HTTP requests it has in hand.

Asked by the routes (new work is refused), the envelope (which counts, and tells clients to close) and the gateway
deployment, which begins the draining and waits for its end. One event loop only.

    serving --begin--> draining --the last request in hand has ended--> idle
"""

import asyncio

from workers.errors import RequestRefused

LAST_WORDS_S = 1.0
"""A gateway's patience, once its own time is over, with each of: clients that do not take the last events of answers
that are cut off, connections that do not close, owners that do not settle."""
CUT_OFF_S = LAST_WORDS_S + 1.0
"""The launcher's with a gateway that cuts off: its last words, and the call there and back."""
LEAVING_S = 3 * LAST_WORDS_S + 1.0
"""Serve's with a gateway on its way out, beyond --shutdown-timeout: all three, and closing what it had open."""


class Draining:
    """One gateway's way out."""

    def __init__(self) -> None:
        self._begun = False
        self._in_hand = 0
        self._changed = asyncio.Event()

    @property
    def begun(self) -> bool:
        """No new work is taken."""
        return self._begun

    @property
    def in_hand(self) -> int:
        """HTTP requests whose answers are not complete."""
        return self._in_hand

    def begin(self) -> None:
        """From now on new work is refused. Idempotent."""
        self._begun = True

    def check(self) -> None:
        """RequestRefused 503 while draining."""
        if self._begun:
            raise shutting_down()

    def enter(self) -> None:
        """A request has come in."""
        self._in_hand += 1

    def leave(self) -> None:
        """Its answer is complete, or nobody waits for it."""
        self._in_hand -= 1
        self._changed.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """True as soon as nothing is in hand; False after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._in_hand:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


def shutting_down() -> RequestRefused:
    """What a client is told that comes too late, or whose answer was cut off by the end of the draining."""
    return RequestRefused("The service is shutting down.", code="service_unavailable", status=503)
