"""Dispatch: the gateway's only door to worker groups. An attempt is one dispatch of a part's request to one group.

Implemented over the Serve handle and the token channel (serve_dispatch.py), over an engine in this process
(cluster/cli/batch/local_dispatch.py), and by tests/support/fake_backend.py. What comes of an attempt is told to the
part: take(), end(). Whether a request is tried again is the Generation's decision.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.routing.route_table import RouteTable
from tandem.workers.messages.request import Abort, GenerationRequest


class DrainingGroup(Struct, frozen=True, kw_only=True):
    """A group that is to end, at one moment."""

    id: str
    state: str
    running: int
    waiting: int


class DrainState(Struct, frozen=True, kw_only=True):
    """The course of a drain so far. kind: "group" or "node"; id: of that. groups: those that have not ended;
    other_groups: the number of groups that serve and stay. gateways: the number of those on a node that have not
    ended."""

    kind: str
    id: str
    groups: list[DrainingGroup]
    other_groups: int
    timeout_s: float
    gateways: int = 0


class Dispatch(Protocol):
    """All groups of one service, as one: three calls for an attempt, the rest is about the groups."""

    def send(self, part: RequestPart, hint: RouteHint) -> None:
        """Dispatches a part's request; returns at once. RequestRefused (503) when nothing can be dispatched."""
        ...

    def abort(self, abort: Abort) -> None:
        """Ends the request of an attempt, or one choice of it, in its group; the answer follows. Never waits."""
        ...

    def cancel(self, part: RequestPart) -> None:
        """Gives the attempt up: its group stops working on it, and its deltas are ignored. Called in the end, whatever
        has happened; after the last delta it only forgets the attempt. Never waits; idempotent."""
        ...

    @property
    def hold_s(self) -> float:
        """Seconds that a request waits for a group to come back when there is none."""
        ...

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        """True if some group serves that is not among those to avoid."""
        ...

    def ready(self) -> bool:
        """True while at least one group would take a request and makes progress, or is_asleep."""
        ...

    @property
    def is_asleep(self) -> bool:
        """True while no group serves and none need: the next request brings one, and is held until then."""
        ...

    def load(self) -> Mapping[str, float | int | str]:
        """Returns what `/load` shows: at least `num_requests_running` and `num_requests_waiting`, summed over
        groups."""
        ...

    async def groups(self) -> Sequence[tuple[GroupRecord, GroupReport | None]]:
        """Every known group by its id, with its report if it has ever sent one."""
        ...

    async def reset_prefix_caches(self) -> Collection[str]:
        """Has every group forget the KV that no running request uses. Returns the groups that have not confirmed it in
        time. RequestRefused (503) when nobody can be told."""
        ...

    async def drain(self, target: str, timeout_s: float | None) -> DrainState:
        """Begins the planned end of a group or a node, or says how far it is. timeout_s: for requests that run; None:
        the service's. RequestRefused for what cannot be drained."""
        ...

    def route_table(self, request: GenerationRequest, hint: RouteHint) -> RouteTable:
        """Returns what each group would cost a request, which goes nowhere. RequestRefused (503) without a group."""
        ...

    async def record(self, group: str) -> Mapping[str, Any]:
        """Has a group write what it has recorded; returns where that is, and what it is. RequestRefused for an unknown
        group, one that records nothing, and while nobody answers."""
        ...

    async def metrics(self, *, with_tenants: bool) -> str:
        """The engines' metrics in Prometheus text form; "" when there are none. Without tenants: nothing that names
        one, nor an adapter of its own."""
        ...
