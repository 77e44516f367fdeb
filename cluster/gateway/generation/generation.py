"""Generation: one HTTP request, from its admission to its bill, in one task.

    admit --> dispatch each prompt --> [ group lost or full --> next group ]* --> settle

The HTTP side iterates steps(); whatever happens to it (a finish, a disconnect, Serve cancelling the handler) it only
calls close(), which never waits. The task then aborts what still runs, waits a little for the group's count, gives back
what the tenant did not use, and writes the bill. Each of several prompts is served by a coroutine of that task. Next:
serve_dispatch.py, over which a part goes to a group; failover.py decides where it goes after that.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import ExitStack
from functools import partial

import msgspec

from tandem.cluster.gateway.generation.ended_record import RequestTimes, ended_record
from tandem.cluster.gateway.generation.failover import Failover
from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.part import RequestPart, terminal_state
from tandem.cluster.gateway.generation.quarantine import Convicted
from tandem.cluster.gateway.records.trace_context import TraceContext
from tandem.cluster.routing.route_hint import hint_of
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.refusals import lost
from tandem.workers.messages.request import Ended, TokenDelta, Usage

log = logging.getLogger("tandem.gateway")
GAP_S = 1.0
"""Time for last deltas that the group's answer has overtaken."""
REDISPATCH_S = 0.2
NO_GROUP_POLL_S = 1.0
NONE_BECAME_READY = "no worker group became ready; `tandem status` tells the operator why"
PARTS_AT_ONCE = DELTAS_AT_ONCE = 64  # that begin, that are read, before the event loop turns

PartDeltas = tuple[RequestPart, list[TokenDelta]]
"""A part and its deltas of one step."""


class Generation:
    """Owns a request from its admission to its bill: start(), read steps(), close(). began_s: of the gateway's clock.
    first_token_s: seconds from then until the reader has the first token, which it notes.
    held: resources that end with it. prompt_field, grammar_field: names in the client's body, for refusals. at_once:
    parts that are dispatched at a time; None: all. trace: its place in a trace, if there are traces."""

    def __init__(
        self,
        context: GatewayContext,
        parts: list[RequestPart],
        *,
        tenant: str,
        model: str,
        began_s: float,
        held: ExitStack | None = None,
        prompt_field: str = "prompt",
        grammar_field: str | None = None,
        at_once: int | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        self.parts = parts
        self.began_s = began_s
        self.first_token_s: float | None = None
        self.error: Exception | None = None
        self._context = context
        self._trace = trace
        self._held = held if held is not None else ExitStack()
        self._tenant = tenant
        self._prompt_field = prompt_field
        self._grammar_field = grammar_field
        self._at_once = at_once or len(parts)
        adapter = parts[0].request.adapter
        self._bill = BillingRecord(
            id=parts[0].request.request_id,
            time_s=context.wall_clock(),
            tenant=tenant,
            model=model,
            adapter=None if adapter is None else f"{adapter.name}@{adapter.digest}",
        )
        self._loop = asyncio.get_running_loop()
        self._now = self._loop.time
        self._started_s = self._now()
        self._ready_s = context.clock()
        self._admitted_s: float | None = None
        self._steps: deque[PartDeltas] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._is_started = False
        self._is_woken = False
        self._attend: Callable[[], Awaitable[None]] | None = None
        self._closing = asyncio.Event()
        self._num_over = 0
        self._reservation: Reservation | None = None
        for part in parts:
            part.on_step = partial(self._take, part)

    # ---- the HTTP side -------------------------------------------------------------------------------------------

    def start(self, attend: Callable[[], Awaitable[None]] | None = None) -> None:
        """Starts the task. attend: is awaited by the reader after each wake(); what it raises goes to the reader."""
        self._is_started = True
        self._attend = attend
        self._context.metrics.generation_began()
        self._context.tasks.start(self._own(), f"request {self._bill.id}")

    async def steps(self) -> AsyncIterator[PartDeltas]:
        """Yields (part, its deltas of one step) until every choice has finished. Raises why it was refused or failed,
        after what was delivered."""
        num_deltas, closed = 0, set[RequestPart]()
        while len(closed) < len(self.parts):
            if self._is_woken:
                await self._be_attentive()
            elif self._steps:
                part, deltas = self._steps.popleft()
                self._check_rows(part, deltas)
                yield part, deltas
                if not part.open_choices:
                    closed.add(part)
                if (num_deltas := num_deltas + len(deltas)) >= DELTAS_AT_ONCE:
                    num_deltas = await asyncio.sleep(0, 0)  # steps that have come never wait; others have streams too
            elif self.error is not None:
                raise self.error
            elif self._num_over == len(self.parts):
                self._fail(GroupLost("the stream ended early"))
            else:
                await self._wait_for_news()

    def wake(self) -> None:
        """The reader is to attend to something else for a moment. Never waits."""
        self._is_woken = True
        self._tell_reader()

    def stop_choice(self, part: RequestPart, choice: int, keep: int) -> None:
        """A stop string was found: the engine ends this choice and bills `keep` tokens of it."""
        part.kept[choice] = keep
        if part.is_sent:
            self._abort(part, choice)

    async def usage(self) -> Usage:
        """Returns the bill: what was delivered, and the cached tokens, which are awaited for usage_s."""
        try:
            async with asyncio.timeout(self._context.times.usage_s):
                while self._num_over < len(self.parts) and any(part.cached_tokens is None for part in self.parts):
                    await (self._be_attentive() if self._is_woken else self._wait_for_news())
        except TimeoutError:
            pass
        return self.counted()

    def counted(self) -> Usage:
        """The bill as far as it is known now. Prompts that only queued are not on it, nor those of which nothing came
        by a fault of ours; those that a client has left half-way are."""
        computed = [part for part in self.parts if part.is_computed or (self.error is None and part.is_begun)]
        return Usage(
            prompt_tokens=sum(len(part.request.prompt_token_ids) for part in computed),
            completion_tokens=sum(choice.tokens for part in computed for choice in part.choices),
            cached_tokens=sum(part.cached_tokens or 0 for part in computed),
        )

    def close(self) -> None:
        """The HTTP side is done, for whatever reason. Never waits; idempotent."""
        self._closing.set()
        for part in self.parts:
            part.news.set()
        if not self._is_started:
            self._held.close()

    def _check_rows(self, part: RequestPart, deltas: list[TokenDelta]) -> None:
        """RequestRefused when a row of the request has failed on the ranks."""
        for delta in deltas:
            if delta.finish_reason == "error":
                error = part.failure(delta)
                self._fail(error)
                raise error

    async def _be_attentive(self) -> None:
        self._is_woken = False
        if self._attend is not None:
            await self._attend()

    async def _wait_for_news(self) -> None:
        """Waits until there is more than the reader has seen."""
        self._reader = self._loop.create_future()
        await self._reader

    def _tell_reader(self) -> None:
        """Wakes the reader, if it waits. For each token: an asyncio.Event takes twice the time."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # ---- the task ------------------------------------------------------------------------------------------------

    async def _own(self) -> None:
        with self._held:
            try:
                await self._serve_admitted()
                await self._closing.wait()
            finally:  # also when the task is cancelled
                await self._settle()

    async def _serve_admitted(self) -> None:
        try:
            await self._admit()
            if len(self.parts) == 1:
                await self._serve(self.parts[0])
            else:
                await self._serve_all()
        except Exception as error:
            self._fail(error)

    async def _admit(self) -> None:
        """Reserves what the tenant's request may take. From here on a bill is owed."""
        context = self._context
        context.quarantine.check(part.request for part in self.parts)
        prompt = sum(len(part.request.prompt_token_ids) for part in self.parts)
        output = sum(part.request.sampling.max_tokens * part.request.sampling.n for part in self.parts)
        is_open_ended = any(part.is_open_ended for part in self.parts)
        self._reservation = await context.tenancy.admit(self._tenant, prompt, output, is_open_ended=is_open_ended)
        self._admitted_s = context.clock()
        context.ledger.accepted(self._bill)

    async def _serve_all(self) -> None:
        free = asyncio.Semaphore(self._at_once)
        async with asyncio.TaskGroup() as serving:
            for number, part in enumerate(self.parts, 1):
                serving.create_task(self._serve_in_turn(part, free))
                if number % PARTS_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _serve_in_turn(self, part: RequestPart, free: asyncio.Semaphore) -> None:
        async with free:
            await self._serve(part)

    async def _serve(self, part: RequestPart) -> None:
        """One prompt, until its last delta has come, nobody wants it any more, or it has failed."""
        try:
            await self._serve_prompt(part)
        except RequestRefused as error:
            self._fail(error)
        except Exception as error:
            log.exception("request %s was not served in order", part.request.public_id)
            self._fail(error)
        finally:
            self._num_over += 1
            self._tell_reader()

    async def _serve_prompt(self, part: RequestPart) -> None:
        """Hands the part's deltas to the reader until the last one. Raises why there are no more.
        BeamGeneration overrides this."""
        await self._attempts(part)

    async def _attempts(self, part: RequestPart) -> None:
        """Attempts of one request, until its last delta has come or nobody wants it any more. Raises when no group may
        try it again."""
        failover = Failover(self._context.probation_tokens)
        while not self._closing.is_set():
            ended = await self._attempt(part, failover)
            if ended is None or part.is_complete or part.open_choices == 0:  # or the text of each choice has ended
                return
            await self._prepare_next(part, failover, ended)

    async def _attempt(self, part: RequestPart, failover: Failover) -> Ended | None:
        """Sends the request to a group and waits for its end. Returns the answer of a group that refused or lost it;
        None when the request is over."""
        dispatch = self._context.dispatch
        overlaps = await self._context.find_overlaps(part.request)
        if self._closing.is_set() or not part.open_choices:  # meanwhile
            dispatch.cancel(part)
            return None
        part.begin_attempt()
        clock = self._context.clock
        began_s = clock()
        try:
            dispatch.send(part, hint_of(part.request, failover.avoid, part.session, overlaps))
            sent_s = self._now()
            for choice in part.kept.keys() - part.request.ended_choices:  # a stop string was found meanwhile
                self._abort(part, choice)
            ended = await self._until_ended(part)
            if ended is not None and ended.refused is None:
                return await self._last_deltas(part, ended)
            if ended is not None and ended.loss not in (None, "unknown"):
                # for what it sent before: later tokens of a group that may be frozen are not read
                await self._pause(part)
            part.note_service(sent_s, self._now())
            return ended
        finally:
            part.is_sent = False
            part.note_attempt(began_s, clock())
            dispatch.cancel(part)

    async def _until_ended(self, part: RequestPart) -> Ended | None:
        is_limited = self._context.queue_timeout_s is not None and not part.is_begun
        since_s = self._started_s if is_limited else self._now()
        while not part.is_complete and (ended := part.look()) is None:
            if self._closing.is_set():
                await self._leave(part)
                return None
            if part.has_row:
                await part.wait(None)
                continue
            left_s = since_s + self._hold_s() - self._now()
            if not await part.wait(NO_GROUP_POLL_S if left_s <= 0 else min(left_s, NO_GROUP_POLL_S)):
                self._check_hold(since_s)
        return None if part.is_complete else ended

    def _hold_s(self) -> float:
        limit_s = self._context.queue_timeout_s
        return self._context.dispatch.hold_s if limit_s is None else limit_s

    def _check_hold(self, since_s: float) -> None:
        """RequestRefused when no group has taken a request since then, and for too long there has been none."""
        if self._now() >= since_s + self._hold_s() and not self._context.dispatch.has_group():
            raise RequestRefused(NONE_BECAME_READY, code="service_unavailable", status=503)

    async def _last_deltas(self, part: RequestPart, ended: Ended) -> Ended | None:
        """The group's answer has overtaken the last deltas, or none will come because of an abort."""
        deadline_s = self._now() + GAP_S
        while not part.is_complete and (left_s := deadline_s - self._now()) > 0:
            if part.is_aborted and part.has_all(ended):
                break
            await part.wait(left_s)
        if self._closing.is_set() or part.is_complete or part.has_all(ended):
            part.finish(ended)
            return None
        return lost(part.request, "its last tokens did not arrive within 1 s", "bystander")

    async def _prepare_next(self, part: RequestPart, failover: Failover, ended: Ended) -> None:
        """Makes the request for the next attempt, or raises why there is none."""
        left_s = self._left_s(part)

        def has_group(avoid: Collection[str]) -> bool:
            return left_s != 0.0 and self._context.dispatch.has_group(avoid)

        try:
            goes_on = failover.after(part, ended, has_group)
        except Convicted:
            self._context.quarantine.add(part.request)
            raise
        if not goes_on:
            part.request = msgspec.structs.replace(part.request, deadline_s=left_s)
            return
        log.warning("request %s goes to another group: %s", part.request.public_id, ended.refused and ended.refused[3])
        if part.unserved_since_s is not None and self._now() >= part.unserved_since_s + self._hold_s():
            raise RequestRefused("no worker group took the request", code="service_unavailable", status=503)
        await self._pause(part)  # by then the router knows which group is gone
        if not self._closing.is_set():
            if failover.is_suspect or not part.is_begun:  # a copy of it may have been convicted meanwhile
                self._context.quarantine.check([part.request])
            part.next_request(self._left_s(part), is_suspect=failover.is_suspect)
            self._context.metrics.moved()

    def _left_s(self, part: RequestPart) -> float | None:
        """Returns what is left of the request's time in the queue; None: no limit."""
        limit_s = self._context.queue_timeout_s
        return None if limit_s is None or part.is_begun else max(0.0, self._started_s + limit_s - self._now())

    async def _leave(self, part: RequestPart) -> None:
        """Nobody reads any more: ends what still runs, and waits for the group's count."""
        if part.open_choices:
            self._abort(part, None)
        deadline_s = self._now() + self._context.times.drain_s
        while not part.is_complete and part.look() is None and (left_s := deadline_s - self._now()) > 0:
            await part.wait(left_s)
        if (ended := part.look()) is not None and ended.refused is None:
            part.finish(ended)

    async def _pause(self, part: RequestPart) -> None:
        """Waits a moment, unless the client leaves or the answer gets complete."""
        part.news.clear()
        deadline_s = self._now() + REDISPATCH_S
        while not (self._closing.is_set() or part.is_complete) and (left_s := deadline_s - self._now()) > 0:
            await part.wait(left_s)

    def _abort(self, part: RequestPart, choice: int | None) -> None:
        self._context.dispatch.abort(part.aborted(choice))

    def _take(self, part: RequestPart, deltas: list[TokenDelta]) -> None:
        """New deltas of a part: for the reader."""
        self._steps.append((part, deltas))
        self._tell_reader()

    def _fail(self, error: Exception) -> None:
        """The first error is the request's."""
        if self.error is None:
            if isinstance(error, RequestRefused) and error.param == "prompt":
                error.param = self._prompt_field  # the engine's field name, as the client has it
            field = self._grammar_field
            if isinstance(error, RequestRefused) and error.code == "invalid_grammar" and field and error.param is None:
                error = RequestRefused(f"{field}: {error}", code=error.code, param=field)
            self.error = error
        self._tell_reader()

    # ---- the bill ------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        await self._count_unread()
        context, terminal = self._context, terminal_state(self.parts, self.error)
        usage = self.counted() if terminal != "rejected" else Usage(0, 0)
        seconds = context.clock() - self.began_s
        context.metrics.generation_ended(terminal, seconds)
        if terminal == "rejected":
            context.metrics.tenant_rejected(self._tenant, self._why_rejected())
        time_s = context.wall_clock() - seconds
        times = RequestTimes(time_s, self.began_s, self._ready_s, self._admitted_s, self.first_token_s, seconds)
        context.records.add(ended_record(self._bill, self.parts, terminal, usage, self.error, times), self._trace)
        if self._reservation is None:
            return
        context.tenancy.settle(self._reservation, usage.prompt_tokens + usage.completion_tokens)
        context.metrics.tenant_billed(self._tenant, usage)
        await context.ledger.settle(self._bill.ended(terminal, usage, context.wall_clock()))

    async def _count_unread(self) -> None:
        """Counts what came after the HTTP side had left: it was generated all the same."""
        while self._steps:
            part, deltas = self._steps.popleft()
            for delta in deltas:
                try:
                    part.choices[delta.choice].take(delta)
                except Exception:
                    log.exception("unread tokens of request %s were not counted", self._bill.id)
            if len(self._steps) % DELTAS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _why_rejected(self) -> str:
        if isinstance(self.error, OverLimit):
            return self.error.reason
        return self.error.code if isinstance(self.error, RequestRefused) else "internal_error"
