"""DrainingGroups: groups that Serve is taking down (scaling in, a new version), whose requests are handed over in time,
and those that an operator drains, which hand them over themselves. Neither gets new requests.

Serve's router no longer lists a group that Serve takes down while it still serves; at the end of --shutdown-timeout
Serve kills it. One that is drained says so in its record.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable

from msgspec import structs

from tandem.cluster.fleet.fleet_view import FleetView, GroupRecord
from tandem.cluster.gateway.generation.dispatch import DrainingGroup, DrainState
from tandem.cluster.ray_private.node_ends import RayNode, drain_node, nodes_called
from tandem.cluster.ray_private.ray_facts import draining_nodes
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

HAND_OVER_S = 2.0
"""Before the end of the timeout: requests that are still running are moved."""


class DrainingGroups:
    """running: the groups that Serve's router lists, None before it lists any. timeout_s: how long Serve lets a group
    finish its requests."""

    def __init__(
        self, running: Callable[[], Collection[str] | None], timeout_s: float, clock: Callable[[], float]
    ) -> None:
        self._running = running
        self._after_s = max(timeout_s - HAND_OVER_S, timeout_s / 2)
        self._clock = clock
        self._known: set[str] = set()
        self._since_s: dict[str, float] = {}
        self._told: set[str] = set()

    @property
    def groups(self) -> Collection[str]:
        """The ids of these groups."""
        return self._since_s.keys() | self._told

    def refresh(self, records: Iterable[GroupRecord]) -> None:
        """Looks which of these groups the router no longer lists, or say that they drain. One that the router never
        listed is about to be."""
        states = {record.group: record.state for record in records}
        self._told = {group for group, state in states.items() if state == "draining"}
        running = self._running()
        if running is None:
            return
        self._known |= set(running)
        serving = states.keys()
        leaving = (serving & self._known) - set(running)
        self._known &= serving | set(running)
        self._since_s = {group: self._since_s.get(group, self._clock()) for group in leaving}

    def is_due(self, group: str) -> bool:
        """True if requests in this group must move now."""
        since_s = self._since_s.get(group)
        return since_s is not None and self._clock() - since_s >= self._after_s


class Drains:
    """The drains that an operator asks for: of a group, through its order in Redis, or of a node, through Ray. Asking
    again is asking how far it is: an order stands, and a node that is drained stays so.

    timeout_s: unless the operator says another. nodes, drain, draining: of Ray; they block."""

    def __init__(
        self,
        fleet: FleetView,
        timeout_s: float,
        nodes: Callable[[str], list[RayNode]] = nodes_called,
        drain: Callable[[str, str, float], str] = drain_node,
        draining: Callable[[], set[str]] = draining_nodes,
    ) -> None:
        self._fleet, self._timeout_s = fleet, timeout_s
        self._nodes, self._drain, self._draining = nodes, drain, draining

    async def ask(self, target: str, timeout_s: float | None) -> DrainState:
        """Drains the group of that id, or the node of that id, address or name. RequestRefused: 404 for neither,
        400 for a node that cannot go, 503 while Redis or Ray's head is away."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if (record := self._fleet.records.get(target)) is not None:
            return await self._ask_group(record, timeout_s)
        return await self._ask_node(target, timeout_s)

    async def _ask_group(self, record: GroupRecord, timeout_s: float) -> DrainState:
        if record.state == "loading":
            raise _refused(f"Group {record.group} has not loaded yet; it can be drained once it serves.", 409)
        try:
            await self._fleet.order_drain(record.group, timeout_s)
        except RedisUnavailable as error:
            raise _refused(f"The group cannot be told now, because Redis {error.state}; try again.", 503) from None
        return self._state("group", record.group, timeout_s, lambda one: one.group == record.group)

    async def _ask_node(self, target: str, timeout_s: float) -> DrainState:
        try:
            found = await asyncio.to_thread(self._nodes, target)
            going = await asyncio.to_thread(self._draining)
        except Exception as error:  # whatever Ray raises while its head is away
            raise _refused(f"Ray does not say which nodes there are: {error}".splitlines()[0], 503) from error
        if not found:
            raise _refused(f"There is no group and no node {target[:64]!r}.", 404)
        if len(found) > 1:
            ids = ", ".join(node.node_id for node in found)
            raise _refused(f"{len(found)} nodes are called {target[:64]!r}: {ids}. Give an id.", 400)
        (node,) = found
        if node.is_head:
            words = "is Ray's head, which no other node can take the place of; stop the service in its place"
            raise _refused(f"Node {node.address} {words}.", 400)
        if node.node_id not in going:
            why = await asyncio.to_thread(self._drain, node.node_id, "drained by an operator", timeout_s)
            if why:
                raise _refused(f"Ray does not drain node {node.address}: {why}", 400)
        state = self._state("node", node.node_id, timeout_s, lambda one: node.node_id in (one.host, *one.nodes))
        try:
            there = [gateway for gateway in await self._fleet.read_gateways() if gateway.host == node.node_id]
        except RedisUnavailable:
            there = []
        return structs.replace(state, gateways=len(there))

    def _state(self, kind: str, name: str, timeout_s: float, ends: Callable[[GroupRecord], bool]) -> DrainState:
        records = list(self._fleet.records.values())
        groups = [
            DrainingGroup(id=one.group, state=one.state, running=one.running, waiting=one.waiting)
            for one in records
            if ends(one)
        ]
        others = sum(one.state == "serving" and not ends(one) for one in records)
        return DrainState(kind=kind, id=name, groups=groups, other_groups=others, timeout_s=timeout_s)


def _refused(message: str, status: int) -> RequestRefused:
    code = {400: "invalid_value", 404: "not_found", 409: "not_serving", 503: "service_unavailable"}[status]
    return RequestRefused(message, code=code, status=status, param=None if status == 503 else "target")
