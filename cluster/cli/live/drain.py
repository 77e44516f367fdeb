"""`tandem drain GROUP|NODE`: asks any gateway for a planned end, and follows it to that."""

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tandem.cluster.cli.base.terminal import say
from tandem.cluster.cli.client.running_service import on_endpoint
from tandem.configs.errors import SettingsError

if TYPE_CHECKING:
    from tandem.cluster.cli.client.endpoint import Endpoint

ROUTE = "/admin/drain"
LOOK_S = 1.0
MARGIN_S = 30.0
"""Beyond the time that requests have: for the end of processes, and for gateways to see it."""
ENDED, NOT_IN_TIME, INTERRUPTED = 0, 1, 130


@on_endpoint
def drain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="GROUP|NODE", help="Id of a group, or id, address or name of a node; `status` has them."
        ),
    ],
    service: "AbstractContextManager[Endpoint]",
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", help="Seconds for requests that run; then they move. Default: --shutdown-timeout."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the end. Default: --wait.")] = True,
) -> None:
    """End a group or a node as planned: no request is lost.

    New requests go elsewhere, those that run end or move to other groups, and another group is started in place of
    each. The exit status is 1 when it is not over within --timeout and half a minute, though it goes on then.
    """
    if timeout is not None and not timeout >= 0:
        raise SettingsError(f"{timeout:g} must be at least 0", "--timeout")
    with service as endpoint:
        follow = DrainWatch(endpoint, target, timeout)
        try:
            status = follow.begin(wait)
        except KeyboardInterrupt:
            say("no longer followed; the drain goes on")
            status = INTERRUPTED
    sys.exit(status)


class DrainWatch:
    """One drain, from the order to its end; a line for each change."""

    def __init__(
        self,
        endpoint: "Endpoint",
        target: str,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._endpoint, self._clock, self._pause = endpoint, clock, pause
        self._body = {"target": target} | ({} if timeout_s is None else {"timeout_s": timeout_s})
        self._said = ""

    def begin(self, wait: bool) -> int:
        """Gives the order, and waits for the end if asked to. EndpointError when it is refused."""
        state = self._ask()
        self._tell(state)
        if state["other_groups"] == 0 and state["groups"]:
            say("no other group serves: requests are held until the next one has loaded")
        if not wait:
            return ENDED
        deadline_s = self._clock() + state["timeout_s"] + MARGIN_S
        while state["groups"] or state["gateways"]:
            if self._clock() > deadline_s:
                say(f"not over within {state['timeout_s'] + MARGIN_S:.0f} s; it goes on")
                return NOT_IN_TIME
            self._pause(LOOK_S)
            state = self._again(state)
            self._tell(state)
        typer.echo(f"{state['kind']} {state['id']} is drained; groups that serve: {state['other_groups']}")
        return ENDED

    def _ask(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self._endpoint.post(ROUTE, self._body))
        return found

    def _again(self, before: dict[str, Any]) -> dict[str, Any]:
        """Asks how far it is. What is no longer there has ended. A gateway that ends with its node has another in its
        place, so one answer that fails says nothing."""
        from tandem.cluster.cli.client.endpoint import EndpointError, NotThere

        try:
            return self._ask()
        except NotThere:
            return before | {"groups": [], "gateways": 0}
        except EndpointError as error:
            self._say(f"no answer now: {error}")
            return before

    def _tell(self, state: dict[str, Any]) -> None:
        parts = [
            f"group {one['id']} {one['state']}, running {one['running']}, waiting {one['waiting']}"
            for one in state["groups"]
        ]
        parts += [f"gateways there: {state['gateways']}"] if state["gateways"] else []
        if parts:
            self._say("; ".join(parts))

    def _say(self, line: str) -> None:
        if line != self._said:
            say(line)
            self._said = line
