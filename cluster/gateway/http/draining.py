"""Draining of one gateway: whether it still takes work, and how many HTTP requests it has in flight.

Used by the routes (new work is refused), the middleware (which counts, and has clients close) and the gateway
deployment, which begins the draining and waits for its end. One event loop only.

    serving --begin--> draining --the last request in flight has ended--> idle
"""

import asyncio

from tandem.workers.messages.errors import RequestRefused

LAST_WORDS_S = 1.0
"""A gateway's grace period after the timeout for each of: clients that do not read the last events of answers that are
cut off, connections that do not close, owner tasks that do not end."""
CUT_OFF_S = LAST_WORDS_S + 1.0
"""The launcher's grace period for a gateway that cuts off: the last events, and the call there and back."""
LEAVING_S = 3 * LAST_WORDS_S + 1.0
"""Serve's grace period for a gateway that ends, beyond its time: all three, and closing what it had open."""


class Draining:
    """The state of one gateway's draining."""

    def __init__(self) -> None:
        self._begun = False
        self._is_cut_off = False
        self._in_flight = 0
        self._changed = asyncio.Event()

    @property
    def begun(self) -> bool:
        """True when no new work is taken."""
        return self._begun

    @property
    def in_flight(self) -> int:
        """HTTP requests whose answers are not complete."""
        return self._in_flight

    def begin(self) -> None:
        """Refuses new work from now on. Idempotent."""
        self._begun = True

    @property
    def is_cut_off(self) -> bool:
        """True when answers that wait for something elsewhere are to end."""
        return self._is_cut_off

    def cut_off(self) -> None:
        """Ends what is in flight from now on, as far as it watches. Idempotent."""
        self._is_cut_off = True

    def check(self) -> None:
        """RequestRefused 503 while draining."""
        if self._begun:
            raise shutting_down()

    def enter(self) -> None:
        """Counts a request that came in."""
        self._in_flight += 1

    def leave(self) -> None:
        """Counts a request whose answer is complete, or whose client has left."""
        self._in_flight -= 1
        self._changed.set()

    async def wait_idle(self, timeout_s: float | None) -> bool:
        """True as soon as nothing is in flight; False after timeout_s, None: never."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._in_flight:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True


def shutting_down() -> RequestRefused:
    """The error for a request that comes while draining, or whose answer was cut off at its end."""
    return RequestRefused("The service is shutting down.", code="service_unavailable", status=503)
