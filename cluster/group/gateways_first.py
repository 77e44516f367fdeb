"""The order in which gateways and groups of a version with another model take over: gateways first.

Serve ends an old group as soon as a new one runs, and old gateways can send nothing to new groups. So a new group that
could serve tells so in its record, for which new gateways wait, and tells Serve only once they have taken the place of
the old ones. What they get meanwhile they hold for a moment.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.gateway_records import GatewayRecord

log = logging.getLogger("tandem.group")
FOLLOW_S = 45.0
"""The longest wait: without their own gateways groups are of no use to anybody, but Serve shows them as ready."""
LOOK_PERIOD_S, SETTLE_S = 0.5, 2.0
"""The latter for Serve's proxies to learn which gateways there are."""


def are_to_follow(own: GroupRecord, fleet: Iterable[GroupRecord], gateways: Iterable[GatewayRecord]) -> bool:
    """True while gateways of another kind take requests although those of `own` may (ServeDispatch.is_outnumbered):
    half of the groups are of its kind, with itself."""
    serving = [record for record in fleet if record.state == "serving" and record.group != own.group]
    others = sum(record.is_other(own.kind) for record in serving)
    may_come = 0 < 2 * others <= len(serving) + 1
    return may_come and any(gateway.is_other(own.kind) and not gateway.is_leaving for gateway in gateways)


async def wait_for_gateways(
    are_missing: Callable[[], Awaitable[bool]],
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Returns once old gateways are no longer in the place of new ones, after FOLLOW_S at most."""
    began_s, waited = clock(), False
    while await are_missing():
        if clock() - began_s >= FOLLOW_S:
            log.warning("no gateway with this group's model has come in %.0f s", FOLLOW_S)
            return
        waited = True
        await pause(LOOK_PERIOD_S)
    if waited:
        await pause(SETTLE_S)
