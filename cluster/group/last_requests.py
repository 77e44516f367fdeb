"""The time for which a group that Serve takes down stays for the requests that it still computes.

Gateways move them to other groups shortly before --shutdown-timeout is over, and the group ends then; what nobody could
take is held until a group comes. But nobody ever takes requests over that are for another model than the new version's:
those end where they are, for as long as streams have when a version is replaced.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from tandem.cluster.fleet.fleet_view import GroupRecord

LOOK_PERIOD_S = 2.0


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
