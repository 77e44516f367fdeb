"""One batch in the gateway that has its lease: its lines are counted, run on idle rows, and written as files.

Nothing is held but a piece of the file, the lines that run, and 16 bytes for each custom_id. While Redis is away rows
wait in memory and no line begins. When the gateway leaves, the lines that run end as requests do, and another gateway
goes on; when it dies, those run again there.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tandem.cluster.gateway.batches.batch_lines import (
    LINE_OVERHEAD,
    BatchLine,
    CustomIds,
    LineAnswer,
    LineCutter,
    answer_row,
    parse_line,
    problem_row,
)
from tandem.cluster.gateway.batches.batch_output import ERRORS, OUTPUT, BatchOutput
from tandem.cluster.gateway.batches.batch_records import LIVE, StoredBatch
from tandem.cluster.gateway.batches.batch_store import BatchPlace, BatchStore
from tandem.cluster.gateway.batches.idle_rows import IdleRows
from tandem.cluster.gateway.batches.line_calls import LineHandler, TryAgain, answer_line, on_idle_rows
from tandem.cluster.gateway.batches.tenant_shares import LineShares
from tandem.cluster.gateway.files.file_store import FileGone, FileStore
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.services.text_services import TextServices
from tandem.cluster.gateway.serving.received import PARSED_FASTER
from tandem.cluster.state.lease import LeaseLost
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.workers.messages.errors import RequestRefused

log = logging.getLogger("tandem.gateway")
T = TypeVar("T")
RENEW_S = 2.0
AGAIN_S = 1.0
"""Pause between two tries of what Redis could not take."""
PROBE_S = 0.1
"""Time for a line that is tried again to be refused again, before another one is."""
GONE = "input_file_gone", "The input file was deleted, or has expired: lines without a row were not run."


@dataclass(frozen=True, kw_only=True)
class BatchServices:
    """Services that all batches of a gateway share. handlers: by url. max_lines: of a file. is_leaving: this one
    goes. is_tenant: there is a tenant of this name."""

    store: BatchStore
    files: FileStore
    text: TextServices
    context: GatewayContext
    handlers: Mapping[str, LineHandler]
    idle: IdleRows
    shares: LineShares
    max_lines: int
    is_leaving: Callable[[], bool]
    is_tenant: Callable[[str], bool] = lambda name: True


class BatchRun:
    """One batch, whose lease this gateway has: run() once."""

    def __init__(self, services: BatchServices, batch: StoredBatch) -> None:
        self._services = services
        self._store = services.store
        self._batch = batch
        self._facts = batch.facts
        self._place = BatchPlace(batch.facts.tenant, batch.facts.id)
        self._lease = services.store.lease(self._place)
        self._left = asyncio.Event()  # lines that run are given up
        self._over = asyncio.Event()
        self._is_lost = self._is_doubtful = False
        self._status = batch.status
        self._is_full = self._gives_way = self._was_expired = False
        self._ends_as = batch.ends_as
        self._again: deque[BatchLine] = deque()  # those that met a limit; no other line begins before them
        self._again_s = 0.0  # when the next line may begin
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    async def run(self) -> None:
        """Goes on with the batch until it is over, this gateway leaves, or another one has the lease."""
        renewing = asyncio.create_task(self._renew_always(), name=f"lease of {self._place.id}")
        try:
            await self._work()
        except LeaseLost:
            log.warning("batch %s goes on in another gateway", self._place.id)
        finally:
            self._left.set()
            self._over.set()  # no cancellation: one that meets a call to Redis may be lost
            await asyncio.gather(renewing, *self._tasks, return_exceptions=True)
            with suppress(RedisUnavailable):
                await self._lease.release()

    @property
    def runs_lines(self) -> bool:
        """True from when its lines have been counted, as long as it is to begin more of them here."""
        return self._status == "in_progress" and not self._is_halted()

    def give_way(self) -> None:
        """Ends run() once the lines that run have ended: another batch takes its place here."""
        self._gives_way = True

    async def _work(self) -> None:
        if self._status == "validating":
            await self._validate()
        if self._status == "in_progress" and not await self._run_lines():
            return
        if self._status in ("finalizing", "cancelling"):
            await self._write_files()

    # ---- validating ----

    async def _validate(self) -> None:
        """Counts the lines."""
        total = 0
        try:
            async with aclosing(self._lines()) as lines:
                async for _ in lines:
                    total += 1
                    if self._is_halted():
                        return
        except FileGone:
            await self._fail(*GONE)
            return
        if not 0 < total <= self._services.max_lines:
            limit = self._services.max_lines
            text = f"The file has {total} lines, above the limit of {limit} (--max-batch-lines)."
            await self._fail("too_many_lines" if total else "empty_file", text if total else "The file has no lines.")
            return
        await self._move("in_progress", {"total": total})
        log.info("batch %s of %s begins: %d lines", self._place.id, self._place.tenant, total)

    async def _fail(self, code: str, message: str) -> None:
        """The batch fails, once the rows that it has are written."""
        error = {"code": code, "message": message, "line": None, "param": "input_file_id"}
        await self._end_as("failed", {"errors": msgspec.json.encode([error])})

    async def _end_as(self, ends_as: str, fields: dict[str, Any]) -> None:
        self._ends_as = ends_as
        await self._move("finalizing", {"ends_as": ends_as, **fields})

    async def _lines(self) -> AsyncGenerator[tuple[int, bytes | None]]:
        """The lines of the input, each with its number; None for one that is longer than a request may be."""
        services = self._services
        try:
            record = await services.files.get(self._place.tenant, self._facts.input_file_id)
        except RequestRefused as refusal:
            if refusal.status == 404:
                raise FileGone from None
            raise LeaseLost from None  # Redis is away: whoever sees it again goes on
        cutter = LineCutter(services.text.settings.max_body_bytes + LINE_OVERHEAD)
        for number in range(record.pieces):
            at = number
            piece = await self._patiently(lambda: services.files.piece(self._place.tenant, record, at))  # noqa: B023
            for line in cutter.feed(piece):
                yield line
        for line in cutter.end():
            yield line

    # ---- in progress ----

    async def _run_lines(self) -> bool:
        """Runs the lines that have no row. True once no line is to be run any more."""
        done = set(await self._patiently(lambda: self._store.numbers(self._place)))
        if done:
            log.info("batch %s goes on here: %d lines have their answers", self._place.id, len(done))
        is_gone = False
        try:
            await self._begin_lines(done)
        except FileGone:
            is_gone = True
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._error is not None:
            raise self._error
        if self._is_lost:
            raise LeaseLost
        if self._status == "cancelling":
            return True
        if self._services.is_leaving() or self._gives_way:
            return False
        if is_gone:
            await self._fail(*GONE)
        else:
            await self._end_as("expired" if self._is_expired() else "completed", {})
        return True

    async def _begin_lines(self, done: set[int]) -> None:
        """Begins lines until each has a row, or none begins here any more. Raises FileGone."""
        ids = CustomIds()
        async with aclosing(self._lines()) as lines:
            async for number, text in lines:
                line = ids.checked(await self._parsed(number, text))
                if number not in done and not await self._begin(line):
                    return
        while self._again or self._tasks:
            if not self._again:
                await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)
            elif not await self._begin(self._again.popleft()):
                return

    async def _parsed(self, number: int, text: bytes | None) -> BatchLine:
        endpoint, services = self._facts.endpoint, self._services
        if text is None:
            limit = services.text.settings.max_body_bytes
            return BatchLine(number, None, "", b"", f"line {number} has more than {limit} bytes, the most of a request")
        size = len(text) // PARSED_FASTER
        change = on_idle_rows(endpoint)
        return await services.text.workers.run(
            self._place.tenant, size, lambda: parse_line(number, text, (endpoint,), change)
        )

    async def _begin(self, line: BatchLine) -> bool:
        """Begins a line once a row is idle, and before it those that met a limit, or says what is wrong with it. False
        when no further line begins here."""
        if line.problem is None and not self._is_expired() and not self._is_full:
            while await self._take_row():
                is_first = not self._again
                self._start(line if is_first else self._again.popleft())
                if is_first:
                    return True
                self._wait_for(PROBE_S)
            if self._is_halted() or not self._is_expired():
                return False
        await self._keep_problem(line)
        return not self._is_halted()

    async def _take_row(self) -> bool:
        idle, tenant = self._services.idle, self._place.tenant
        while not self._is_over():
            if (pause_s := self._pause_s()) > 0:
                await self._pause(min(AGAIN_S, pause_s))
            elif await idle.take(tenant, self._most_lines, self._is_over):
                if self._pause_s() <= 0:
                    return True
                idle.give_back(tenant)  # a line met a limit meanwhile
        return False

    def _most_lines(self) -> int | None:
        limit = self._services.context.tenancy.limits(self._place.tenant).concurrency
        return self._services.shares.most(self._place.tenant, limit)

    def _pause_s(self) -> float:
        """Seconds for which no line begins, as far as is known."""
        return AGAIN_S if self._is_doubtful else self._again_s - asyncio.get_running_loop().time()

    def _wait_for(self, seconds: float) -> None:
        self._again_s = max(self._again_s, asyncio.get_running_loop().time() + seconds)

    def _start(self, line: BatchLine) -> None:
        task = asyncio.create_task(self._answer(line), name=f"line {line.number} of {self._place.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: BatchLine) -> None:
        """The task of one line. Without a row it waits to be begun again."""
        try:
            if not await self._try(line):
                self._again.append(line)
        except (LeaseLost, RequestRefused) as error:
            self._is_lost = True
            log.debug("line %d of batch %s is given up: %s", line.number, self._place.id, error)
        except Exception as error:
            self._error = error
            self._left.set()

    async def _try(self, line: BatchLine) -> bool:
        """Runs a line on the row that was taken. False: it has no row."""
        services, facts = self._services, self._facts
        is_kept = False

        async def keep(answer: LineAnswer) -> None:
            nonlocal is_kept
            is_kept = True
            await self._keep(line.number, answer_row(line, answer), succeeded=answer.status == 200)

        services.context.draining.enter()
        services.context.metrics.lines_running(1)
        try:
            request_id = f"{facts.id}-{line.number}"
            handler = services.handlers[facts.endpoint]
            await answer_line(handler, facts.tenant, line, request_id, self._left, keep)
        except TryAgain as later:
            self._wait_for(max(PROBE_S, later.after_s))
        finally:
            services.context.draining.leave()
            services.context.metrics.lines_running(-1)
            services.idle.give_back(facts.tenant)
        return is_kept

    async def _keep_problem(self, line: BatchLine) -> None:
        """Keeps the row of a line that is not run."""
        if line.problem is None and self._is_expired():
            row = problem_row(line, "batch_expired", "The completion window was over before this line could be run.")
        elif line.problem is None:
            text = f"Your files have more than {self._services.files.max_bytes} bytes (--files-bytes)."
            row = problem_row(line, "content_too_large", text)
        else:
            row = problem_row(line)
        await self._keep(line.number, row, succeeded=False)

    async def _keep(self, number: int, row: bytes, *, succeeded: bool) -> None:
        facts = self._facts
        status, held = await self._patiently(lambda: self._store.keep_row(facts, number, row, succeeded=succeeded))
        self._services.context.metrics.batch_line(OUTPUT if succeeded else ERRORS)
        self._is_full = held > self._services.files.max_bytes
        self._note(status)

    # ---- finalizing ----

    async def _write_files(self) -> None:
        output = BatchOutput(self._store, self._services.files, self._facts, self._patiently)
        written = await output.write(int(self._services.context.wall_clock()))
        ends_as = "cancelled" if self._status == "cancelling" else self._ends_as
        await self._move(ends_as, {f"has_{kind}": int(kind in written) for kind in (OUTPUT, ERRORS)})

    # ---- the lease ----

    async def _renew_always(self) -> None:
        while not self._is_lost:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._over.wait()
            if self._over.is_set():
                return
            try:
                if not await self._lease.take():
                    self._is_lost = True
                    self._left.set()
                    return
                self._note(await self._store.status(self._place))
                if not self._services.is_tenant(self._place.tenant):
                    await self._cancel()
                self._is_doubtful = False
            except RedisUnavailable:
                self._is_doubtful = True
            if self._is_expired():
                self._left.set()

    async def _cancel(self) -> None:
        """Cancels the batch of a tenant that was removed."""
        log.warning("batch %s is cancelled: its tenant %s was removed", self._place.id, self._place.tenant)
        now_s = self._services.context.wall_clock()
        self._note(await self._store.move(self._place, "cancelling", now_s, {}, is_owner=False))

    def _note(self, status: str) -> None:
        """Takes over what others have made of the batch: it is cancelled, gone, or over."""
        if status == "cancelling" and self._status in ("validating", "in_progress"):
            self._status = status
            self._left.set()
        elif status not in LIVE:
            self._is_lost = True
            self._left.set()

    def _is_expired(self) -> bool:
        """True from when the window is over, also where the clock is set back then."""
        self._was_expired |= self._services.context.wall_clock() >= self._facts.expires_s
        return self._was_expired

    def _is_halted(self) -> bool:
        """True when this gateway begins no further line, whatever its line is."""
        is_ending = self._services.is_leaving() or self._gives_way or self._error is not None
        return self._is_lost or self._status == "cancelling" or is_ending

    def _is_over(self) -> bool:
        return self._is_halted() or self._is_expired() or self._left.is_set()

    async def _move(self, to: str, fields: dict[str, Any]) -> None:
        """Changes the status. Where a client was first, it is what the client wished."""
        now_s = self._services.context.wall_clock()
        status = await self._patiently(lambda: self._store.move(self._place, to, now_s, fields, is_owner=True))
        self._status = status
        if status == to and to not in ("in_progress", "finalizing"):
            self._services.context.metrics.batch_ended(to)
            log.info("batch %s of %s is over: %s", self._place.id, self._place.tenant, to)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call to Redis, however long that is away. LeaseLost once another has the lease."""
        while True:
            try:
                return await call()
            except RedisUnavailable as error:
                log.debug("batch %s waits for Redis: %s", self._place.id, error)
            if self._is_lost or self._services.context.draining.is_cut_off:
                raise LeaseLost
            await self._pause(AGAIN_S)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._left.wait()
        if self._left.is_set():
            await asyncio.sleep(min(seconds, 0.1))
