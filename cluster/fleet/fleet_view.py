"""Records of live groups in Redis: each group writes its own once a second; readers get all in one round trip.

group_heartbeat runs in a coordinator, FleetView in a gateway and in `tandem status`. A record that is not renewed for 3
s is gone. When Redis is unavailable FleetView keeps the last fleet it saw, and for 3 s after, when what it reads may be
incomplete. No request waits for these reads.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Literal

import msgspec

from tandem.cluster.fleet.gateway_records import GatewayRecord, read_gateways
from tandem.cluster.fleet.group_drains import DrainOrder, order_drain
from tandem.cluster.fleet.group_events import GroupTally, read_tally
from tandem.cluster.fleet.group_reports import ANSWER_S, GroupReport, GroupReports, decode_record
from tandem.cluster.fleet.prefix_resets import order_reset
from tandem.cluster.fleet.recording_orders import order_recording
from tandem.cluster.state import keys
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.heartbeat import Heartbeat, RecordPlace
from tandem.cluster.state.redis_client import Commands, Part, RedisEmptied, RedisUnavailable, text_of
from tandem.cluster.wire.version import are_of_two_kinds

log = logging.getLogger("tandem.fleet")
PERIOD_S, IDLE_PERIOD_S = 0.5, 1.0
"""Pauses between two reads of the fleet."""
STALLED_AFTER_S = 10.0
SLOW_ANSWER_S = 1.0
MISSING_KEPT_S = 600.0
"""Longer than a call to a machine that is gone takes to fail (420 s): the only group may be replaced as late as that,
and then what the old one had goes to the new one."""
RESET_S, RESET_LOOK_S = 10.0, 0.1
"""Time for all groups to forget their prefix caches, and the pause between two looks whether they have."""
RECORD_TTL_S = keys.GROUP_RECORD_TTL_MS / 1000
GroupState = Literal["loading", "serving", "draining"]


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One group at one moment: what gateways need at once, some 250 bytes. Its statistics are in its GroupReport."""

    group: str
    life: int  # wall-clock ms at which its coordinator started: tells it from another of the same id
    model: str
    state: GroupState
    host: str  # the id of its Ray node: two containers may have one host name
    pid: int  # on that node
    waiting: int = 0
    running: int = 0
    # of those that wait and run, for idle rows only
    idle_waiting: int = 0
    idle_running: int = 0
    outstanding_tokens: int = 0
    kv_used: float = 0.0
    kv_tokens: int = 0  # that its KV cache can hold, 0 before it is there
    stalled_s: float = 0.0  # how long no step has finished although there is work; 0 without work
    # of its weights, over all its ranks; both are 0 until those have reported
    loaded_bytes: int = 0
    total_bytes: int = 0
    fetching: str = ""  # what nodes download of the model, in words
    load_s: float = 0.0  # from the start of its process until it served
    prefix_resets: int = 0  # number of the last order to forget its prefix cache that it has obeyed
    kind: str = ""  # its wire version and model (kind_of()); empty: a release that does not say
    nodes: list[str] = []  # other nodes of its ranks, once their places are known
    figures: list[float] = []  # for the number of groups (scaling/decide.py FIGURES), where that follows the load

    @property
    def is_ready(self) -> bool:
        """True while it takes requests and makes progress."""
        return self.state == "serving" and self.stalled_s <= STALLED_AFTER_S

    def is_other(self, kind: str) -> bool:
        """True if it can do nothing for processes of this kind, as far as both are known."""
        return are_of_two_kinds(kind, self.kind)


class StartFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a group or a gateway could not start, for the launcher to print. flag: what to change."""

    part: str
    message: str
    flag: str | None = None


def group_heartbeat(
    redis: Commands, service: str, read: Callable[[], GroupRecord], period_s: float = 1.0
) -> Heartbeat[GroupRecord]:
    """Writes one group's record each second."""

    def place(record: GroupRecord) -> RecordPlace:
        key = keys.group(service, record.group)
        return RecordPlace(key, keys.groups(service), record.group, keys.GROUP_RECORD_TTL_MS)

    return Heartbeat(redis, place, read, period_s)


class FleetView:
    """The last known records of all groups of one service.

    A Redis that comes back may have lost every record, by its data or by their TTL, while all groups live: for one TTL
    the groups known before stay, and by then each has written its record again.

    reseed: writes durable state into a Redis without data; the first that finds it so calls it. on_emptied: called
    then too, and when another has been first.
    """

    def __init__(
        self,
        redis: Commands,
        service: str,
        reseed: Callable[[], Awaitable[None]] | None = None,
        on_emptied: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._service = service
        self._reseed = reseed
        self._on_emptied = on_emptied
        self._clock = clock
        self._epoch: Epoch | None = None
        self._ids: list[str] = []
        self._complete_at_s = clock()
        self._missing: dict[str, tuple[GroupRecord, float]] = {}
        self.records: dict[str, GroupRecord] = {}
        self.redis_state = ""
        """State of Redis after a failed reading, as RedisUnavailable.state; empty while it answers."""
        self.start_failure: StartFailure | None = None
        """The reason why a group or a gateway of the service could not start, in the last minutes."""
        self._reports = GroupReports(redis, service)
        self._tally = GroupTally()

    @property
    def redis_unavailable(self) -> bool:
        """True from a failed reading to the next one."""
        return bool(self.redis_state)

    async def refresh(self) -> None:
        """Reads the fleet. On failure the last records stay, and `redis_state` says why."""
        started_s, before = self._clock(), self._epoch
        try:
            found = await self._read()
        except RedisUnavailable as error:
            if error.state != self.redis_state:
                log.warning("Redis %s (%s): going on with the last known fleet", error.state, error)
            self.redis_state = error.state
            return
        now_s = self._clock()
        lost_its_data = self._epoch is not None and self._epoch.is_behind(before)
        if self.redis_unavailable or lost_its_data or now_s - started_s >= SLOW_ANSWER_S:
            self._complete_at_s = now_s + RECORD_TTL_S
        known = self.records
        self.records = known | found if now_s < self._complete_at_s else found
        self.redis_state = ""
        self._note_missing(known, now_s)

    async def read_reports(self, answer_s: float = ANSWER_S) -> list[GroupReport]:
        """Asks the groups for their reports, and returns what is known of each after answer_s at most."""
        return await self._reports.read(self.records.keys(), answer_s, may_ask=not self.redis_unavailable)

    async def read_tally(self, answer_s: float = ANSWER_S) -> GroupTally:
        """Returns the counts of groups that started and were lost; the last known ones where Redis does not answer."""
        if not self.redis_unavailable:
            with suppress(RedisUnavailable, TimeoutError):
                async with asyncio.timeout(answer_s):
                    self._tally = await read_tally(self._redis, self._service)
        return self._tally

    async def read_gateways(self) -> list[GatewayRecord]:
        """Returns the records of the gateways that are alive. RedisUnavailable."""
        return await read_gateways(self._redis, self._service)

    async def order_drain(self, group: str, timeout_s: float) -> None:
        """Orders a group to drain. RedisUnavailable."""
        await order_drain(self._redis, self._service, group, DrainOrder(timeout_s=timeout_s))

    async def order_recording(self, group: str) -> bytes | None:
        """Has a group write its recording; returns its answer, None without one in time. RedisUnavailable."""
        return await order_recording(self._redis, self._service, group)

    async def reset_prefix_caches(self, within_s: float = RESET_S) -> list[str]:
        """Orders all groups to forget their prefix caches. Returns those that serve and have not confirmed it after
        within_s. RedisUnavailable."""
        number = await order_reset(self._redis, self._service)
        deadline_s = self._clock() + within_s
        while True:
            await self.refresh()
            left = [g for g, record in self.records.items() if record.is_ready and record.prefix_resets < number]
            if not left or self._clock() >= deadline_s:
                return left
            await asyncio.sleep(RESET_LOOK_S)

    def missing_for(self, seconds: float = 0.0) -> list[GroupRecord]:
        """Last records of groups whose record has been missing for `seconds`, and not for minutes, while Redis answers:
        groups that left, died, or are frozen. Empty while Redis is unavailable."""
        before_s = self._clock() - seconds
        return [
            record for record, since_s in self._missing.values() if since_s <= before_s and not self.redis_unavailable
        ]

    def _note_missing(self, known: dict[str, GroupRecord], now_s: float) -> None:
        kept = {g: v for g, v in self._missing.items() if g not in self.records and now_s - v[1] < MISSING_KEPT_S}
        self._missing = kept | {g: (record, now_s) for g, record in known.items() if g not in self.records}

    @property
    def is_idle(self) -> bool:
        """True while Redis answers and no group works, comes, leaves or stalls, so that reads can be rarer."""
        resting = all(r.is_ready and not (r.running or r.waiting or r.stalled_s) for r in self.records.values())
        return bool(self.records) and resting and not self._missing and not self.redis_unavailable

    async def run(self, then: Callable[[], None], has_work: Callable[[], bool]) -> None:
        """Refreshes until it is cancelled, and calls `then` each time, also while Redis takes long to answer. Reads
        are rarer while the fleet is idle and has_work() is false."""
        while True:
            reading = asyncio.create_task(self.refresh())
            try:
                while not reading.done():
                    await asyncio.wait((reading,), timeout=PERIOD_S)
                    _attempt(then, "the watch of the fleet failed")
            finally:
                reading.cancel()
            _attempt(reading.result, "the fleet was not read: going on with the last known one")
            await asyncio.sleep(IDLE_PERIOD_S if self.is_idle and not has_work() else PERIOD_S)

    async def _read(self) -> dict[str, GroupRecord]:
        there, values = await self._look()
        sentinel = text_of(there) if there is not None else await self._seed()
        before, self._epoch = self._epoch, Epoch(sentinel)
        if self._epoch.is_behind(before):
            self._on_emptied()  # now: what follows may fail, and the next read finds the same sentinel
        gone = [i for i, value in values.items() if value is None]
        found = {
            i: r for i, value in values.items() if (r := decode_record(value, GroupRecord, "record", i)) is not None
        }
        if gone or self.records.keys() - found.keys():
            await self._remove(gone, sentinel)
        return found

    async def _look(self) -> tuple[object, dict[str, object]]:
        """The sentinel, and what each listed group's record is: one round trip, another when a group is new."""
        asked = self._ids
        members, values = await self._redis.pipeline([["SMEMBERS", keys.groups(self._service)], self._mget(asked)])
        assert isinstance(members, set | list), members
        ids = sorted(text_of(i) for i in members)
        if not set(ids) <= set(asked):
            asked, values = ids, await self._redis.command(*self._mget(ids))
        assert isinstance(values, list), values
        self._ids = ids
        self._note_failure(values[1])
        records = dict(zip(asked, values[2:], strict=True))
        return values[0], {i: records[i] for i in ids}

    def _mget(self, ids: list[str]) -> list[Part]:
        own = (keys.SENTINEL, keys.start_failure(self._service))
        return ["MGET", *own, *(keys.group(self._service, i) for i in ids)]

    def _note_failure(self, value: object) -> None:
        failure = None if value is None else decode_record(value, StartFailure, "start failure", self._service)
        if failure is not None and failure != self.start_failure:
            log.warning("%s did not start: %s", failure.part, failure.message)
        self.start_failure = failure

    async def _remove(self, gone: list[str], sentinel: str) -> None:
        """Takes ids without a record from the set; RedisUnavailable when records may be missing by Redis's own fault.

        A Redis that refuses writes (memory or disk full) lets records of living groups expire, or, once emptied, never
        gets them back; it refuses this SET too.
        """
        commands: list[list[Part]] = [["SET", keys.SENTINEL, sentinel, "XX"]]
        if gone:
            commands.append(["SREM", keys.groups(self._service), *gone])
        await self._redis.pipeline(commands)

    async def _seed(self) -> str:
        """Writes durable state again, then the sentinel, to a Redis that lost its data or is new. Returns its value."""
        if self._reseed is None:
            raise RedisEmptied("its data is gone")
        await self._reseed()
        value = secrets.token_hex(8)
        await self._redis.command("SET", keys.SENTINEL, value, "NX")
        return value


async def report_start_failure(redis: Commands, service: str, failure: StartFailure) -> None:
    """Writes a failure for the launcher to print, and `tandem status`; the first one stays, for ten minutes."""
    value = msgspec.msgpack.encode(failure)
    await redis.command("SET", keys.start_failure(service), value, "NX", "EX", keys.START_FAILURE_TTL_S)


async def read_start_failure(redis: Commands, service: str) -> StartFailure | None:
    """The failure left by a process of this service, if any."""
    value = await redis.command("GET", keys.start_failure(service))
    return msgspec.msgpack.decode(value, type=StartFailure) if isinstance(value, bytes) else None


async def write_load_s(redis: Commands, service: str, load_s: float) -> None:
    """Notes how long a group took to load. RedisUnavailable."""
    await redis.command("SET", keys.load_s(service), f"{load_s:.3f}", "EX", keys.LOAD_TTL_S)


async def read_load_s(redis: Commands, service: str) -> float:
    """Returns how long a group took to load last; 0.0 where none has loaded yet, or Redis is unavailable."""
    key = keys.load_s(service)
    try:
        value, _ = await redis.pipeline([["GET", key], ["EXPIRE", key, keys.LOAD_TTL_S]])
    except RedisUnavailable:
        return 0.0
    return float(value) if isinstance(value, bytes) else 0.0


def channel_name(group: str, life: int) -> str:
    """The identity of one life of a group on the token channel."""
    return f"{group}:{life}"


def read_channel_name(name: bytes) -> tuple[str, int]:
    """Returns group and life of a channel_name(); life 0 if it is none."""
    group, _, life = name.decode(errors="replace").rpartition(":")
    return group, int(life) if life.isdecimal() else 0


def _attempt(call: Callable[[], object], failed: str) -> None:
    """Calls, and logs what is raised, so that the loop goes on."""
    try:
        call()
    except Exception:
        log.exception(failed)


def bytes_of(records: Iterable[GroupRecord], groups: int) -> tuple[int, int]:
    """Bytes loaded and bytes in total, over all `groups`. Those that have not reported count with as much to load as
    the others: they serve the same model with the same shards."""
    known = [record for record in records if record.total_bytes]
    most = max((record.total_bytes for record in known), default=0)
    missing = max(0, groups - len(known))
    return sum(r.loaded_bytes for r in known), sum(r.total_bytes for r in known) + missing * most
