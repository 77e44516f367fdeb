"""Events of groups (started, failed, lost), which `tandem serve` prints. Nothing depends on them.

A coordinator writes why its group is lost; when it was killed or is frozen, gateways write "missing". The events are a
short list in Redis, announced, so that the reader sleeps until one comes.
"""

from typing import Literal

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.notifications import announcement
from tandem.cluster.state.redis_client import Commands

MOST_EVENTS = 200
Kind = Literal["serving", "failed", "lost", "missing", "returned", "left", "not_updated"]


class GroupEvent(msgspec.Struct, frozen=True):
    """One event. failed: the group did not start. missing: its record is missing. returned: the record is back.
    not_updated: a new version of the service did not start, of no one group."""

    kind: Kind
    group: str
    reason: str = ""  # of a failure or a loss, for people; of a missing group what is known of its process


async def write_event(redis: Commands, service: str, event: GroupEvent) -> None:
    """Appends an event. Raises RedisUnavailable."""
    key = keys.events(service)
    await redis.pipeline(
        [
            ["RPUSH", key, msgspec.msgpack.encode(event)],
            ["LTRIM", key, -MOST_EVENTS, -1],
            ["EXPIRE", key, keys.EVENTS_TTL_S],
            announcement(key),
        ]
    )


async def take_events(redis: Commands, service: str) -> list[GroupEvent]:
    """Takes the events that are left, the oldest first. Raises RedisUnavailable."""
    values = await redis.command("LPOP", keys.events(service), MOST_EVENTS)
    return [msgspec.msgpack.decode(value, type=GroupEvent) for value in values] if isinstance(values, list) else []
