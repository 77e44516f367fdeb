"""What becomes of groups, for whoever runs the service: `tandem serve` prints it. Nothing depends on these lines.

A coordinator that can still speak says why its group is lost; of one that was killed or is frozen the gateways say that
it has vanished. A short list in Redis, announced, so that the reader sleeps until there is something to read.
"""

from typing import Literal

import msgspec

from cluster.coordination import keys
from cluster.coordination.changes import announcement
from cluster.coordination.client import Commands

MOST_EVENTS = 200
Kind = Literal["serving", "failed", "lost", "vanished", "returned", "left"]


class Event(msgspec.Struct, frozen=True):
    """failed: it did not start. returned: it had vanished. reason: of a failure or a loss, for people."""

    kind: Kind
    group: str
    reason: str = ""


async def write_event(redis: Commands, service: str, event: Event) -> None:
    """RedisAway: nobody learns of it this way."""
    key = keys.events(service)
    await redis.pipeline(
        [
            ["RPUSH", key, msgspec.msgpack.encode(event)],
            ["LTRIM", key, -MOST_EVENTS, -1],
            ["EXPIRE", key, keys.EVENTS_TTL_S],
            announcement(key),
        ]
    )


async def take_events(redis: Commands, service: str) -> list[Event]:
    """Those that nobody has taken, the oldest first. RedisAway."""
    values = await redis.command("LPOP", keys.events(service), MOST_EVENTS)
    return [msgspec.msgpack.decode(value, type=Event) for value in values] if isinstance(values, list) else []
