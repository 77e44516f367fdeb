"""Dispatch: the gateway's only door to worker groups. An attempt is one dispatch of a request to one group.

Implemented over the Serve handle and the token channel (serve_dispatch.py), over an engine in this process
(cluster/cli/batch/local_dispatch.py), and by tests/support/fake_backend.py. Whether a request is tried again is the
Generation's decision.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.wire.token_channel import GROUP_LOST
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, Loss, TokenDelta, Usage


class TokenSink(Protocol):
    """Receiver of what comes of an attempt."""

    def take(self, deltas: list[TokenDelta]) -> bool:
        """All deltas of one step for this request. False when tokens before one of them are missing: then none of
        them is taken."""
        ...

    def wake(self) -> None:
        """The owner's task is to look at the attempt again. Never waits."""
        ...


class Attempt(Protocol):
    """One dispatch. Its owner calls cancel() in the end, whatever has happened."""

    def look(self) -> Ended | None:
        """The group's answer, None while there is none; for the task of the owner only, at once and whenever it is
        woken. The answer may overtake the last deltas. A lost group is a refusal with code GROUP_LOST, one that ends as
        planned one with GROUP_ENDED."""
        ...

    def abort(self, abort: Abort) -> None:
        """Ends the request, or one choice of it, in its group; the answer follows. Never waits. The attempt number of
        the abort does not matter."""
        ...

    def cancel(self) -> None:
        """Gives the attempt up: its group stops working on it, and its deltas are ignored. Never waits; idempotent;
        after the last delta it only forgets the attempt."""
        ...


class Dispatch(Protocol):
    """All groups of one service, as one."""

    def send(self, request: GenerationRequest, hint: RouteHint, to: TokenSink) -> Attempt:
        """Dispatches a request; returns at once. RequestRefused (503) when nothing can be dispatched."""
        ...

    @property
    def hold_s(self) -> float:
        """Seconds that a request waits for a group to come back when there is none."""
        ...

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        """Whether some group serves that is not among those to avoid."""
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


def lost(request: GenerationRequest, message: str, loss: Loss) -> Ended:
    """Returns the answer that a lost group did not give."""
    return Ended(
        request_id=request.request_id,
        attempt=request.attempt,
        positions=[],
        finish_reasons=[],
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        refused=(503, GROUP_LOST, None, message),
        loss=loss,
    )
