"""The gateway's only door to worker groups: submit a request, read its tokens, abort it.

Implemented over the Serve handle and the ZeroMQ token channel by the cluster, and by tests/support/fake_backend.py.
Choosing a group, filling `reply_to` and moving a request whose group died are the implementation's business; HTTP, text
and stop strings are the gateway's.
"""

from collections.abc import Mapping
from typing import Protocol

from tandem.workers.messages.request import Abort, GenerationRequest, TokenDelta


class GenerationStream(Protocol):
    """The token deltas of one submitted request, in order, no gap, no duplicate (`first_position` counts per choice).

    Every choice ends with one delta that has a finish_reason; the request's last delta carries `usage`; after it the
    stream ends. Raises RequestRefused when the request turns out never to have run, GroupLost when its group died and
    nobody took it over. After Abort of the whole request the stream ends soon, with or without "abort" deltas.
    """

    def __aiter__(self) -> "GenerationStream": ...

    async def __anext__(self) -> list[TokenDelta]:
        """All deltas of one step for this request (never empty). StopAsyncIteration after the last."""
        ...

    async def aclose(self) -> None:
        """Releases the stream, aborting the request if it has not ended. Idempotent; later calls of next end."""
        ...


class Backend(Protocol):
    """All groups of one service, as one."""

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        """Dispatches a request and returns at once, before any token.

        RequestRefused (status 429 or 503) when no group takes it.
        """
        ...

    async def abort(self, abort: Abort) -> None:
        """Passes an Abort on; unknown or ended requests are ignored. `attempt` is the request's as submitted.

        With `keep_positions`, the request's final usage counts only what is kept; the other choices go on.
        """
        ...

    def ready(self) -> bool:
        """True while at least one group would take a request and makes progress."""
        ...

    def load(self) -> Mapping[str, float | int | str]:
        """What `/load` shows: at least `num_requests_running` and `num_requests_waiting`, summed over groups."""
        ...

    async def metrics(self, *, with_tenants: bool) -> str:
        """The engines' metrics in Prometheus text form; "" when there are none. Without tenants: nothing that names
        one, nor an adapter of its own."""
        ...
