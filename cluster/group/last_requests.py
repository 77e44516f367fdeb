"""The time for which a group that is taken down, or that an operator drains, stays for the requests that it has.

Gateways move those of a group that Serve takes down to other groups shortly before --shutdown-timeout is over, and the
group ends then; what nobody could take is held until a group comes. But nobody ever takes requests over that are for
another model than the new version's: those end where they are, for as long as streams have when a version is replaced.

A group that is drained takes nothing new and ends with its last request, or when its time is over. Where nobody else
takes requests it ends at once: they are held, and a new group comes the sooner. While Redis does not answer, nobody
knows: it stays, as long as its time is.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from tandem.cluster.fleet.fleet_view import FleetView, GroupRecord

LOOK_PERIOD_S = 2.0
DRAIN_PERIOD_S = 0.5
SEEN_S = 2.0
"""Time until all gateways have seen that a group drains, and what they sent before has arrived."""


def nobody_takes_over(own: GroupRecord, fleet: Iterable[GroupRecord]) -> bool:
    """True if other groups come or serve and none of those that serve is of the kind of `own`."""
    others = [record for record in fleet if record.group != own.group and record.state != "draining"]
    comes = any(record.is_other(own.kind) for record in others)
    return comes and not any(r.state == "serving" and not r.is_other(own.kind) for r in others)


async def time_is_over(
    timeout_s: float,
    is_needed: Callable[[], Awaitable[bool]],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Returns after timeout_s, and later while the group is needed. Serve ends it in the end."""
    await pause(timeout_s)
    while await is_needed():
        await pause(LOOK_PERIOD_S)


class OtherGroups:
    """Answers of the fleet to a group that is to end. fleet: one view, which is kept: a new one that cannot be read is
    empty, and says that there are no others. own: the group's record of now."""

    def __init__(self, fleet: FleetView, own: Callable[[], GroupRecord]) -> None:
        self._fleet = fleet
        self._own = own

    async def may_serve(self) -> bool:
        """True if another group takes its requests, and while that is not known."""
        await self._fleet.refresh()
        return self._fleet.redis_unavailable or others_serve(self._own(), self._fleet.records.values())

    async def may_be_of_no_use(self) -> bool:
        """True if nobody takes its requests over, and while that is not known."""
        await self._fleet.refresh()
        return self._fleet.redis_unavailable or nobody_takes_over(self._own(), self._fleet.records.values())


def others_serve(own: GroupRecord, fleet: Iterable[GroupRecord]) -> bool:
    """True if another group takes the requests of `own`."""
    others = (record for record in fleet if record.group != own.group)
    return any(record.state == "serving" and not record.is_other(own.kind) for record in others)


async def drained(
    timeout_s: float,
    num_requests: Callable[[], int],
    may_have_others: Callable[[], Awaitable[bool]],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> str:
    """Returns, in words, why a group that is drained may end now. may_have_others: another group takes its requests, as
    far as is known."""
    waited_s = 0.0
    while await may_have_others():
        if waited_s >= timeout_s:
            return f"its {num_requests()} requests are handed over after {timeout_s:g} s"
        if waited_s >= SEEN_S and not num_requests():
            return "its requests have ended"
        await pause(DRAIN_PERIOD_S)
        waited_s += DRAIN_PERIOD_S
    return f"no other group serves, and its {num_requests()} requests wait for the next one"
