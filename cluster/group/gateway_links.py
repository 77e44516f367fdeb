"""GatewayLinks: which gateways a group tells of its KV: all that have a record, also those that have sent it nothing.

A gateway's end of the token channel stays as it is while the gateway lives, so its record is read once; after that only
the set of gateways is.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tandem.cluster.fleet.gateway_records import GatewayRecord
from tandem.cluster.state import keys
from tandem.cluster.state.heartbeat import read_live
from tandem.cluster.state.redis_client import Commands, RedisUnavailable
from tandem.workers.messages.request import ReplyTo

log = logging.getLogger("tandem.group")
LOOK_S = 1.0


class GatewayLinks:
    """Looks who the gateways are, until it is cancelled. kind: of the group; gateways of another are not told. follow:
    is called with all of them each time; not while Redis is away. Of two at one address it is the one that came later:
    the other has ended, as its port was free."""

    def __init__(self, redis: Commands, service: str, kind: str, follow: Callable[[Sequence[ReplyTo]], None]) -> None:
        self._redis = redis
        self._service = service
        self._kind = kind
        self._follow = follow
        self._known: dict[str, ReplyTo | None] = {}
        self._unread: set[bytes] = set()

    async def run(self) -> None:
        """Looks every LOOK_S."""
        while True:
            try:
                await self.look()
            except RedisUnavailable as error:
                log.debug("the gateways cannot be read: %s", error)
            except Exception:
                log.exception("the gateways cannot be read")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Reads the set of gateways, and the records of new ones. RedisUnavailable."""
        members = await self._redis.command("SMEMBERS", keys.gateways(self._service))
        assert isinstance(members, set | list), members
        ids = {member.decode() for member in members}
        fresh = sorted(ids - self._known.keys())
        place = partial(keys.gateway, self._service)
        found = await read_live(self._redis, fresh, place, keys.gateways(self._service))
        self._known = {name: end for name, end in self._known.items() if name in ids}
        self._unread &= set(found)
        for value in found:
            if (record := self._read(value)) is not None:
                self._known[record.gateway] = None if record.is_other(self._kind) else record.reply_to
        ends = {end.endpoint: end for end in self._known.values() if end is not None}
        self._follow(list(ends.values()))

    def _read(self, value: bytes) -> GatewayRecord | None:
        """Returns a record; None, with a warning the first time, for one that is none: the others' gateways count."""
        try:
            return msgspec.msgpack.decode(value, type=GatewayRecord)
        except msgspec.DecodeError as error:
            if value not in self._unread:
                log.warning("the record of a gateway cannot be read, so it is not told of KV: %s", error)
            self._unread.add(value)
            return None
