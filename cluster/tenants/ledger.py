"""The ledger: exactly one row for each accepted request, journaled here first, then in Redis, whatever fails.

A row's place in Redis follows from the row (tenant, day of its end, id) and is written only if empty, so sending a row
again changes nothing. After an outage the rows that wait are sent; when Redis has lost them, or a gateway has died,
whole journals are sent again.

    settle --> journal (synced) --> waiting --batch--> Redis --usage_cap.py--> sums by hour
                  '---- replay: own journal, journals left behind ----^
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from tandem.cluster.state import keys
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.lua import load_lua
from tandem.cluster.state.redis_client import Commands, Part, RedisUnavailable
from tandem.cluster.tenants.billing_record import (
    BillingRecord,
    Ledger,
    day_of,
    pack,
)
from tandem.cluster.tenants.journal import Journal, gateway_of, left_behind, read_rows

log = logging.getLogger("tandem.ledger")
BATCH = 256
MAX_WAITING = 50_000
"""Rows kept in memory while Redis is unavailable; the journal has them all."""
PERIOD_S, IDLE_PERIOD_S = 1.0, 5.0
"""Pauses between two looks for a loss: while something is to be sent, and while Redis has everything."""
LOOK_PERIOD_S = 30.0

_WRITE = load_lua(__file__, "usage_write.lua")


class UsageLedger(Ledger):
    """The ledger of one gateway. Used on one event loop. kept_s: how long Redis and the folder keep rows."""

    def __init__(
        self,
        redis: Commands,
        folder: Path,
        gateway: str,
        kept_s: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._folder = folder
        self._kept_s = kept_s
        self._journal = Journal(folder, gateway)
        self._gateway = gateway
        self._written_key = keys.usage_written(gateway)
        self._epoch: Epoch | None = None
        self._clock = clock
        self._waiting: deque[BillingRecord] = deque()
        self._triggered = asyncio.Event()
        self._sending = asyncio.Lock()
        self._must_replay = True
        self._replayed: set[Path] = set()
        self._look_at_s = clock()
        self.late_rows = 0
        """Rows that came to Redis after those of their hour had been summed up: they are in the journal only."""

    # ---- Ledger --------------------------------------------------------------------------------------------------

    def accepted(self, record: BillingRecord) -> None:
        self._journal.note(record)

    async def settle(self, record: BillingRecord) -> None:
        self._journal.note(record)
        try:
            await self._journal.sync()
        except asyncio.CancelledError:
            self._must_replay = True
            self._triggered.set()
            raise
        self._waiting.append(record)
        if len(self._waiting) > MAX_WAITING and not self._journal.is_failing:
            self._waiting.clear()
            self._must_replay = True
        self._triggered.set()

    # ---- to Redis ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends until it is cancelled."""
        while True:
            period_s = PERIOD_S
            try:
                await self.send()
                period_s = IDLE_PERIOD_S
            except RedisUnavailable as error:
                log.debug("%d usage rows wait: %s", len(self._waiting), error)
            except Exception:
                log.exception("usage rows were not sent: they stay in the journal")
                self._must_replay = True
            try:
                async with asyncio.timeout(period_s):
                    await self._triggered.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)  # more will have ended by then

    async def send(self) -> None:
        """Brings everything to Redis that is not there: RedisUnavailable leaves the rest for the next time."""
        async with self._sending:
            self._triggered.clear()
            await self._look_for_loss()
            await self._replay_own()
            await self._replay_left_behind()
            while self._waiting:
                batch = [self._waiting[i] for i in range(min(BATCH, len(self._waiting)))]
                sent_s = 0.0 if self._must_replay else max(row.time_s for row in batch)
                self._note_late(await self._write(batch, self._gateway, sent_s))
                for _ in batch:
                    self._waiting.popleft()

    async def close(self) -> bool:
        """Brings what is left to the journal, and to Redis if it is there. True when Redis has everything."""
        is_told = True
        self._look_at_s = self._clock()  # nobody may come after this one to take up what was left a moment ago
        try:
            await self.send()
        except RedisUnavailable as error:
            is_told = False
            log.warning("%d usage rows are in %s only: %s", len(self._waiting), self._folder, error)
        await self._journal.close()
        return is_told

    async def _look_for_loss(self) -> None:
        """Notices that Redis has lost its rows, or was restored from before some of them: they are sent again."""
        fresh = secrets.token_hex(8)
        _, answers = await self._redis.pipeline(
            [
                ["SET", keys.USAGE_ORIGIN, fresh, "NX", "EX", self._kept_s],
                ["MGET", keys.USAGE_ORIGIN, self._written_key],
            ]
        )
        assert isinstance(answers, list), answers
        there = Epoch.of(*answers)
        if there.id is None:
            raise RedisUnavailable("it lost what was just written")
        if self._epoch is None or there.is_behind(self._epoch):
            if self._epoch is not None:
                log.warning("Redis had lost the usage rows: journals are sent again")
            self._epoch = there._replace(counter=0)
            self._must_replay = True
            self._replayed.clear()
            self._look_at_s = self._clock()

    async def _replay_own(self) -> None:
        """A need that comes up meanwhile is for the next time."""
        if not self._must_replay:
            return
        self._must_replay = False
        try:
            for path in list(self._journal.paths):
                await self._replay(path, is_over=False)
        except BaseException:
            self._must_replay = True
            raise

    async def _replay_left_behind(self) -> None:
        now_s = self._clock()
        if now_s < self._look_at_s:
            return
        found = await asyncio.to_thread(lambda: list(left_behind(self._folder, self._kept_s)))
        for path in found:
            if path not in self._replayed:
                await self._replay(path, is_over=True)
                self._replayed.add(path)
        self._look_at_s = now_s + LOOK_PERIOD_S

    async def _replay(self, path: Path, *, is_over: bool) -> None:
        """Late are the rows that its gateway had not sent; those that wait here are counted when they are sent."""
        if not path.exists():  # removed for its age
            return
        gateway = gateway_of(path)
        answer = await self._redis.command("GET", keys.usage_sent(gateway))
        sent_s, read_s = float(answer) if isinstance(answer, bytes) else 0.0, 0.0
        rows, late = read_rows(path, is_over=is_over), list[BillingRecord]()
        while batch := await asyncio.to_thread(lambda: list(islice(rows, BATCH))):
            late += [row for row in await self._write(batch, gateway) if row.time_s > sent_s]
            read_s = max(read_s, *(row.time_s for row in batch))
        waiting = {row.id for row in self._waiting}
        self._note_late([row for row in late if row.id not in waiting])
        if read_s > sent_s:
            await self._write([], gateway, read_s)

    def _note_late(self, late: Sequence[BillingRecord]) -> None:
        if late:
            self.late_rows += len(late)
            log.error("%d usage rows came later than --usage-rows allows: they are in %s only", len(late), self._folder)

    async def _write(self, rows: Sequence[BillingRecord], gateway: str, sent_s: float = 0.0) -> list[BillingRecord]:
        """Rows that are there already stay as they are. Returns those that are not written, as their hour is sums.
        gateway: whose they are. sent_s: with these, all of its rows that ended until then were sent."""
        assert self._epoch is not None, "written after a look"
        epoch = self._epoch._replace(counter=self._epoch.counter + 1)
        places = sorted({(row.tenant, day_of(row.time_s)) for row in rows})
        numbers = {place: number for number, place in enumerate(places, 1)}
        names: list[Part] = [keys.USAGE_SUMMED, keys.USAGE_ORIGIN, self._written_key, keys.usage_sent(gateway)]
        values: list[Part] = [self._kept_s, epoch.counter, sent_s, len(places), *(tenant for tenant, _ in places)]
        for tenant, day in places:
            names += [keys.usage(tenant, day), keys.usage_tenants(day)]
        for row in rows:
            values += [numbers[row.tenant, day_of(row.time_s)], row.time_s, row.id, pack(row)]
        answer = await self._redis.command("EVAL", _WRITE, len(names), *names, *values)
        assert isinstance(answer, list), answer
        self._epoch = epoch
        late = {row_id.decode() for row_id in answer}
        return [row for row in rows if row.id in late]
