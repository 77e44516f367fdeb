"""The fleet as Redis sees it: each group writes its record once a second, everyone reads them with one MGET.

GroupBeat runs in a coordinator, FleetView in a gateway and in `tandem status`. A record that is not renewed for 3 s is
gone. When Redis is away FleetView keeps the last fleet it saw; no request waits on this file.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol

import msgspec

from cluster.coordination import keys
from cluster.coordination.client import Part, RedisAway

log = logging.getLogger("tandem.registry")
LEAST_PERIOD_S = 0.1
GroupState = Literal["loading", "serving", "draining"]


class Commands(Protocol):
    """What this file needs of a Redis client."""

    async def command(self, *parts: Part) -> object: ...

    async def pipeline(self, commands: list[list[Part]]) -> list[object]: ...


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One group at one moment. `stats` is msgpack of the engine's statistics; `epoch` names the group's life."""

    group: str
    epoch: int
    model: str
    state: GroupState
    host: str
    pid: int
    rank_pids: list[int] = []
    waiting: int = 0
    running: int = 0
    outstanding_tokens: int = 0
    kv_used: float = 0.0
    stats: bytes = b""


class StartFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group or a gateway could not start, for the launcher to print. `flag` is what to change, when known."""

    part: str
    message: str
    flag: str | None = None


class GroupBeat:
    """Writes one group's record each second until it is cancelled."""

    def __init__(self, redis: Commands, service: str, read: Callable[[], GroupRecord], period_s: float = 1.0) -> None:
        self._redis = redis
        self._service = service
        self._read = read
        self._period_s = period_s
        self._hurried = asyncio.Event()

    async def beat(self) -> None:
        """Writes the record now."""
        record = self._read()
        key = keys.group(self._service, record.group)
        ids = keys.groups(self._service)
        await self._redis.pipeline(
            [
                ["SET", key, msgspec.msgpack.encode(record), "PX", keys.GROUP_RECORD_TTL_MS],
                ["SADD", ids, record.group],
                ["EXPIRE", ids, keys.GROUP_SET_TTL_S],
            ]
        )

    async def run(self) -> None:
        """Beats forever; a beat that fails is skipped."""
        while True:
            try:
                await self.beat()
            except RedisAway as error:
                log.warning("heartbeat skipped: %s", error)
            self._hurried.clear()
            await asyncio.sleep(LEAST_PERIOD_S)
            try:
                async with asyncio.timeout(self._period_s - LEAST_PERIOD_S):
                    await self._hurried.wait()
            except TimeoutError:
                continue

    def hurry(self) -> None:
        """Something changed that others wait for: the next beat comes now (at most ten a second)."""
        self._hurried.set()

    async def leave(self) -> None:
        """Removes the record: the group is gone on purpose."""
        record = self._read()
        await self._redis.pipeline(
            [
                ["DEL", keys.group(self._service, record.group)],
                ["SREM", keys.groups(self._service), record.group],
            ]
        )


class FleetView:
    """The last known records of all groups of one service."""

    def __init__(self, redis: Commands, service: str, reseed: Callable[[], Awaitable[None]] | None = None) -> None:
        self._redis = redis
        self._service = service
        self._reseed = reseed
        self.records: dict[str, GroupRecord] = {}
        self.redis_away = False

    async def refresh(self) -> None:
        """Reads the fleet. On failure the last records stay, and `redis_away` says so."""
        try:
            self.records = await self._read()
            self.redis_away = False
        except RedisAway as error:
            if not self.redis_away:
                log.warning("Redis is away (%s): going on with the last known fleet", error)
            self.redis_away = True

    async def run(self, period_s: float = 0.5) -> None:
        """Refreshes forever."""
        while True:
            await self.refresh()
            await asyncio.sleep(period_s)

    async def _read(self) -> dict[str, GroupRecord]:
        ids_key = keys.groups(self._service)
        answer = await self._redis.command("SMEMBERS", ids_key)
        assert isinstance(answer, set | list), answer
        ids = sorted(_text(i) for i in answer)
        values = await self._redis.command("MGET", keys.SENTINEL, *(keys.group(self._service, i) for i in ids))
        assert isinstance(values, list), values
        if values[0] is None:
            await self._seed()
        gone = [i for i, value in zip(ids, values[1:], strict=True) if value is None]
        if gone:
            await self._redis.command("SREM", ids_key, *gone)
        decode = msgspec.msgpack.Decoder(GroupRecord).decode
        return {i: decode(value) for i, value in zip(ids, values[1:], strict=True) if value is not None}

    async def _seed(self) -> None:
        """Redis has lost its data (or is new): durable state is written again, then the sentinel."""
        if self._reseed is None:
            raise RedisAway("its data is gone")
        await self._reseed()
        await self._redis.command("SET", keys.SENTINEL, "1")


async def report_start_failure(redis: Commands, service: str, failure: StartFailure) -> None:
    """Leaves word for the launcher; the first failure stays."""
    value = msgspec.msgpack.encode(failure)
    await redis.command("SET", keys.start_failure(service), value, "NX", "EX", keys.START_FAILURE_TTL_S)


async def read_start_failure(redis: Commands, service: str) -> StartFailure | None:
    """The failure left by a process of this service, if any."""
    value = await redis.command("GET", keys.start_failure(service))
    return msgspec.msgpack.decode(value, type=StartFailure) if isinstance(value, bytes) else None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
