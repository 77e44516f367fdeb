"""Events of groups (started, failed, lost), which `tandem serve` prints, and their counts. No serving depends on them.

A coordinator writes why its group is lost; when it was killed or is frozen, gateways write "missing". The events are a
short list in Redis, announced, so that the reader sleeps until one comes. The counts are beside it, for /metrics and
`tandem status`: a group that dies while it has no request shows in nothing else.
"""

from typing import Literal, NamedTuple

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.notifications import announcement
from tandem.cluster.state.redis_client import Commands

MOST_EVENTS = 200
MOST_COUNTED = 1000
"""Groups of which it is remembered that they were counted: several processes may tell of one within seconds."""
Kind = Literal["serving", "failed", "lost", "missing", "returned", "left", "not_updated"]
_WRITE = load_lua(__file__, "group_event.lua")
_COUNTED = {
    "serving": ("starts", "start"),
    "failed": ("start_failures", "start"),
    "lost": ("losses", "end"),
    "missing": ("losses", "end"),
    "left": ("", "end"),
}
"""Fields of the tally, if any, and what a group has one only of, by kind."""


class GroupEvent(msgspec.Struct, frozen=True):
    """One event. failed: the group did not start. missing: its record is missing. returned: the record is back.
    not_updated: a new version of the service did not start, of no one group."""

    kind: Kind
    group: str
    reason: str = ""  # of a failure or a loss, for people; of a missing group what is known of its process

    @property
    def loss(self) -> str:
        """Words for a loss."""
        if self.kind == "lost":
            return f"group {self.group} is lost: {self.reason}"
        return f"group {self.group} is missing: {self.reason or 'it was killed or hangs'}"


class GroupTally(NamedTuple):
    """Counts of groups since the service started, or since Redis lost its data. starts: that came to serve.
    start_failures: that did not. losses: that died, or gave no sign of life; not those that ended as planned.
    last_loss: the last of these, so many seconds ago."""

    starts: int = 0
    start_failures: int = 0
    losses: int = 0
    last_loss: GroupEvent | None = None
    last_loss_s: float = 0.0


async def write_event(redis: Commands, service: str, event: GroupEvent) -> None:
    """Appends an event, and counts it, once for a group whoever tells of it. Raises RedisUnavailable."""
    key = keys.events(service)
    field, once = _COUNTED.get(event.kind, ("", ""))
    places = (key, keys.group_tally(service), keys.groups_counted(service))
    bounds = (MOST_EVENTS, keys.EVENTS_TTL_S, MOST_COUNTED, keys.TALLY_TTL_S)
    mark = f"{once}:{event.group}" if once else ""
    await redis.pipeline(
        [
            ["EVAL", _WRITE, len(places), *places, msgspec.msgpack.encode(event), *bounds, mark, field],
            announcement(key),
        ]
    )


async def take_events(redis: Commands, service: str) -> list[GroupEvent]:
    """Takes the events that are left, the oldest first. Raises RedisUnavailable."""
    values = await redis.command("LPOP", keys.events(service), MOST_EVENTS)
    return [msgspec.msgpack.decode(value, type=GroupEvent) for value in values] if isinstance(values, list) else []


async def read_tally(redis: Commands, service: str) -> GroupTally:
    """Reads the counts, and has them live on. Raises RedisUnavailable."""
    key = keys.group_tally(service)
    values, now, *_ = await redis.pipeline(
        [
            ["HMGET", key, "starts", "start_failures", "losses", "last_loss", "last_loss_s"],
            ["TIME"],
            ["EXPIRE", key, keys.TALLY_TTL_S],
            ["EXPIRE", keys.groups_counted(service), keys.TALLY_TTL_S],
        ]
    )
    assert isinstance(values, list) and isinstance(now, list | tuple), (values, now)
    starts, failures, losses = (int(count or 0) for count in values[:3])
    if values[3] is None:
        return GroupTally(starts, failures, losses)
    event = msgspec.msgpack.decode(values[3], type=GroupEvent)
    return GroupTally(starts, failures, losses, event, max(0.0, int(now[0]) - int(values[4])))
