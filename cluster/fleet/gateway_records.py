"""Records of the gateways of a service, by which groups find them, and each shows the metrics of all.

One port leads to any of them (SO_REUSEPORT, or Serve's proxy), so a scrape of /metrics meets one at random. Each writes
its metrics to Redis, where there are several; the one that is scraped adds the others'.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

import msgspec

from tandem.cluster.process.exit_watch import ExitWatch
from tandem.cluster.state import keys
from tandem.cluster.state.heartbeat import Heartbeat, RecordPlace, read_live
from tandem.cluster.state.redis_client import Commands
from tandem.cluster.wire.version import are_of_two_kinds
from tandem.workers.messages.request import ReplyTo

log = logging.getLogger("tandem.fleet")
PERIOD_S = 2.0


class GatewayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One gateway at one moment."""

    gateway: str
    host: str  # the id of its Ray node
    pid: int  # on that node
    ready: bool  # it would take a request
    in_flight: int  # HTTP requests whose answers are not complete
    metrics: bytes  # its own families as Prometheus text
    tenant_metrics: bytes  # those that name tenants
    held: int = 0  # requests that wait while no group can take them
    quarantined: list[str] = []  # digests of prompts that have ended a group (gateway/generation/quarantine.py)
    is_leaving: bool = False  # Serve takes it down, and its streams end
    refused: str = ""  # why the deployment's user_config is not in force
    kind: str = ""  # its wire version and model, as in GroupRecord
    reply_to: ReplyTo | None = None  # its end of the token channel, at which groups tell it of their KV
    routing_policy: str = ""  # by which it chooses a group; of a gateway of an older version not known

    def is_other(self, kind: str) -> bool:
        """True if groups of this kind can do nothing for it, as far as both are known."""
        return are_of_two_kinds(kind, self.kind)


class GatewayHeartbeat(Heartbeat[GatewayRecord]):
    """Writes one gateway's record every two seconds, and reads those of the others. `make` is called on a thread: with
    a thousand tenants it takes a while, and streams must not wait."""

    def __init__(self, redis: Commands, service: str, make: Callable[[], GatewayRecord]) -> None:
        self._service = service
        self._make = make
        self._made: list[GatewayRecord] = []
        self.others: list[GatewayRecord] = []
        """The others as last read; they stay while Redis is unavailable."""
        self._exits = ExitWatch()
        super().__init__(redis, self._place_of, lambda: self._made[-1], PERIOD_S)

    async def send_heartbeat(self) -> None:
        self._made = [await asyncio.to_thread(self._make)]
        await super().send_heartbeat()
        everyone = await read_gateways(self._redis, self._service)
        others = [record for record in everyone if record.gateway != self._made[-1].gateway]
        self._tell_of_ends({record.gateway for record in others})
        self.others = others
        self._exits.watch_only([record.pid for record in others if record.host == self._made[-1].host])

    async def leave(self) -> None:
        self._exits.close()
        if self._made:
            await super().leave()

    def _tell_of_ends(self, alive: set[str]) -> None:
        """Writes a line for each gateway without a record now; with its end, where the kernel tells."""
        for record in self.others:
            if record.gateway not in alive:
                how = self._exits.how_it_ended(record.pid) if record.host == self._made[-1].host else None
                reason = f"its process {how}" if how else "it has ended, or its record was not renewed"
                log.warning("gateway %s is gone: %s", record.gateway, reason)

    def _place_of(self, record: GatewayRecord) -> RecordPlace:
        key = keys.gateway(self._service, record.gateway)
        return RecordPlace(key, keys.gateways(self._service), record.gateway, keys.GATEWAY_RECORD_TTL_MS)


async def read_gateways(redis: Commands, service: str) -> list[GatewayRecord]:
    """Reads the records of gateways that are alive, by id. RedisUnavailable."""
    members = await redis.command("SMEMBERS", keys.gateways(service))
    assert isinstance(members, set | list), members
    ids = sorted(member.decode() for member in members)
    values = await read_live(redis, ids, partial(keys.gateway, service), keys.gateways(service))
    return [msgspec.msgpack.decode(value, type=GatewayRecord) for value in values]
