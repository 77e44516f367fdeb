"""One HTTP request's generation: its backend requests, their streams, and the owner task that ends them.

The HTTP side reads `steps()`; whatever happens to it (a finish, a disconnect, Serve cancelling the handler) it only
calls `close()`, which never waits. The owner task then aborts what still runs, drains it, gives back what its tenant
did not use and settles the ledger.

    opening --admitted--> running --all choices finished--> finished --close--> settled
       |           +------ close (disconnect, error) --> aborted --drained--> settled
       |-- refused by the tenant's limits --> rejected (no row is owed)
       +-- refused by the backend, no token yet --> rejected --> settled
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field

from tandem.cluster.gateway.generation.backend import GenerationStream
from tandem.cluster.gateway.services import GatewayState
from tandem.cluster.tenants.billing_record import Opening, Outcome
from tandem.cluster.tenants.tenant_admission import OverLimit, Reservation
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.request import Abort, GenerationRequest, TokenDelta, Usage
from tandem.workers.text.choice_text import ChoiceText

log = logging.getLogger("tandem.gateway")
STEPS_AT_ONCE = 64


@dataclass(kw_only=True)
class RequestPart:
    """One backend request (one prompt) of a run, and where its choices begin in the answer. is_open_ended: the client
    named no max_tokens, the request has what the context holds."""

    request: GenerationRequest
    choices: list[ChoiceText]
    first_choice: int
    is_open_ended: bool = False
    stream: GenerationStream | None = None
    usage: Usage | None = None
    ended: bool = False

    @property
    def open_choices(self) -> int:
        return sum(choice.finished is None for choice in self.choices)

    @property
    def is_computed(self) -> bool:
        """Its prompt is known to have been processed: a token came of it, or an end of its own."""
        return any(choice.tokens or choice.finished in ("stop", "length") for choice in self.choices)

    @property
    def is_begun(self) -> bool:
        """True once its group has done more than queue it."""
        return self.usage is not None and self.usage.prompt_tokens > 0


Step = tuple[RequestPart, list[TokenDelta]]


@dataclass(kw_only=True)
class RequestRun:
    """Owns a request from submission to its ledger row. Create, `await open()`, read `steps()`, `close()`.
    prompt_field: the prompt's name in the client's body. held: resources that end with it."""

    state: GatewayState
    parts: list[RequestPart]
    tenant: str
    model: str
    began_s: float
    prompt_field: str = "prompt"
    error: Exception | None = None
    held: ExitStack = field(default_factory=ExitStack)
    _is_open: bool = False
    _reservation: Reservation | None = None
    _closed: asyncio.Event = field(default_factory=asyncio.Event)
    _pumps: "list[asyncio.Task[None]]" = field(default_factory=list)

    async def open(self) -> None:
        """Submits every part. Safe to cancel: the owner finishes the submission and takes it back."""
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_open = True
        self.state.metrics.generation_began()
        self.state.tasks.start(self._own(opened), f"request {self.parts[0].request.request_id}")
        await asyncio.shield(opened)

    async def steps(self) -> AsyncIterator[Step]:
        """(part, its deltas of one step) until every choice has finished. Raises what the streams raise."""
        steps = self._single(self.parts[0]) if len(self.parts) == 1 else self._merged()
        try:
            async for step in steps:
                yield step
        except Exception as error:
            if isinstance(error, RequestRefused) and error.param == "prompt":
                error.param = self.prompt_field  # the engine's field name, as the client has it
            self.error = error
            raise

    async def stop_choice(self, part: RequestPart, choice: int, keep: int) -> None:
        """A stop string was found: the engine ends this choice and bills `keep` tokens of it."""
        request = part.request
        abort = Abort(request_id=request.request_id, attempt=request.attempt, choice=choice, keep_positions=keep)
        await self.state.backend.abort(abort)

    async def usage(self) -> Usage:
        """The bill: what was delivered, and the cached tokens that the last deltas report (awaited for usage_s)."""
        try:
            async with asyncio.timeout(self.state.times.usage_s):
                if self._pumps:
                    await asyncio.wait(self._pumps)
                    return self.counted()
                for part in self.parts:
                    await self._read_usage(part)
        except (TimeoutError, RequestRefused, GroupLost):
            pass
        return self.counted()

    def counted(self) -> Usage:
        """The bill as far as it is known now. Prompts that only queued are not on it, nor those of which nothing came
        by a fault of ours; those that a client has left half-way are."""
        computed = [part for part in self.parts if part.is_computed or (self.error is None and part.is_begun)]
        return Usage(
            prompt_tokens=sum(len(part.request.prompt_token_ids) for part in computed),
            completion_tokens=sum(choice.tokens for part in computed for choice in part.choices),
            cached_tokens=sum(part.usage.cached_tokens for part in computed if part.usage is not None),
        )

    def close(self) -> None:
        """The HTTP side is done, for whatever reason. Never waits; idempotent."""
        self._closed.set()
        if not self._is_open:
            self.held.close()

    # ---- reading -------------------------------------------------------------------------------------------------

    def _note(self, part: RequestPart, deltas: list[TokenDelta]) -> bool:
        """Keeps the values of deltas that are about the whole request. True when they are its last."""
        last = deltas[-1]
        if last.usage is not None:
            part.usage = last.usage
            part.ended = True
        if last.finish_reason is not None:
            for delta in deltas:
                if delta.finish_reason == "error":
                    message = delta.error or "The request failed in the engine."
                    raise RequestRefused(message, code="internal_error", status=500)
        return part.ended

    def _check_whole(self, part: RequestPart) -> None:
        """A stream that ends before its choices do has lost something."""
        if part.open_choices:
            raise GroupLost("the stream ended early")

    async def _read_usage(self, part: RequestPart) -> None:
        """Drains a part whose choices all finished until its last delta, which has the usage."""
        if part.ended or part.stream is None:
            return
        async for deltas in part.stream:
            if self._note(part, deltas):
                return

    async def _single(self, part: RequestPart) -> AsyncIterator[Step]:
        assert part.stream is not None
        async for deltas in part.stream:
            self._note(part, deltas)
            yield part, deltas
            if not part.open_choices:
                return
        part.ended = True
        self._check_whole(part)

    async def _merged(self) -> AsyncIterator[Step]:
        """The steps of several streams as they come: one pump task each, ended by the owner."""
        queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue()
        self._pumps += [self.state.tasks.start(self._pump(part, queue), "pump") for part in self.parts]
        num_open, num_steps = len(self.parts), 0
        for _ in self.parts:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                was_open = item[0].open_choices > 0
                yield item
                num_open -= was_open and not item[0].open_choices
                if not num_open:
                    return
                if (num_steps := num_steps + 1) % STEPS_AT_ONCE == 0:
                    await asyncio.sleep(0)  # a full queue never waits, and others have streams too
        for part in self.parts:
            self._check_whole(part)

    async def _pump(self, part: RequestPart, queue: "asyncio.Queue[Step | Exception | None]") -> None:
        try:
            assert part.stream is not None
            async for deltas in part.stream:
                self._note(part, deltas)
                queue.put_nowait((part, deltas))
                if part.ended:
                    break
            else:
                part.ended = True
        except Exception as error:
            queue.put_nowait(error)
        queue.put_nowait(None)

    # ---- the owner -----------------------------------------------------------------------------------------------

    async def _own(self, opened: "asyncio.Future[None]") -> None:
        with self.held:
            await self._own_to_the_end(opened)

    async def _own_to_the_end(self, opened: "asyncio.Future[None]") -> None:
        try:
            await self._submit(opened)
            await self._closed.wait()
            await self._release_all()
        finally:
            await self._settle()

    async def _submit(self, opened: "asyncio.Future[None]") -> None:
        try:
            await self._admit()
            for number, part in enumerate(self.parts, 1):
                part.stream = await self.state.backend.submit(part.request)
                if self._closed.is_set():
                    break
                if number % STEPS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            opened.set_result(None)
        except Exception as error:
            self.error = error
            opened.set_exception(error)
            opened.exception()
            self._closed.set()

    async def _release_all(self) -> None:
        """Ends every part; what one of them raises keeps nothing of the others."""
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        ends = await asyncio.gather(*(self._release(part) for part in self.parts), return_exceptions=True)
        for part, end in zip(self.parts, ends, strict=True):
            if end is not None:
                log.error("request %s was not released in order", part.request.request_id, exc_info=end)

    async def _admit(self) -> None:
        """Reserves what the tenant's request may take. From here on a ledger row is owed."""
        prompt = sum(len(part.request.prompt_token_ids) for part in self.parts)
        output = sum(part.request.sampling.max_tokens * part.request.sampling.n for part in self.parts)
        is_open_ended = any(part.is_open_ended for part in self.parts)
        self._reservation = await self.state.tenancy.admit(self.tenant, prompt, output, is_open_ended=is_open_ended)
        self.state.ledger.accepted(
            Opening(
                request_id=self.parts[0].request.request_id,
                tenant=self.tenant,
                model=self.model,
                adapter=self._adapter(),
            )
        )

    def _adapter(self) -> str | None:
        adapter = self.parts[0].request.adapter
        return None if adapter is None else f"{adapter.name}@{adapter.digest}"

    async def _release(self, part: RequestPart) -> None:
        """Aborts and drains what still runs; closes the stream whatever happens."""
        if part.stream is None:
            return
        try:
            if not part.ended:
                async with asyncio.timeout(self.state.times.drain_s):
                    await self._abort_and_drain(part, part.stream)
        except (TimeoutError, RequestRefused, GroupLost):
            pass
        finally:
            await part.stream.aclose()

    async def _abort_and_drain(self, part: RequestPart, stream: GenerationStream) -> None:
        if part.open_choices:
            request = part.request
            await self.state.backend.abort(Abort(request_id=request.request_id, attempt=request.attempt))
        async for deltas in stream:
            for delta in deltas:
                part.choices[delta.choice].take(delta)
            if deltas[-1].usage is not None:
                part.usage = deltas[-1].usage
                return

    async def _settle(self) -> None:
        now_s = self.state.clock()
        terminal = self._terminal()
        self.state.metrics.generation_ended(terminal, now_s - self.began_s)
        if terminal == "rejected":
            self.state.metrics.tenant_rejected(self.tenant, self._why_rejected())
        if self._reservation is None:
            return
        usage = self.counted() if terminal != "rejected" else Usage(0, 0)
        self.state.tenancy.settle(self._reservation, usage.prompt_tokens + usage.completion_tokens)
        self.state.metrics.tenant_billed(self.tenant, usage)
        outcome = Outcome(
            request_id=self.parts[0].request.request_id,
            tenant=self.tenant,
            model=self.model,
            adapter=self._adapter(),
            terminal=terminal,
            usage=usage,
            began_s=self.began_s,
            ended_s=now_s,
        )
        await self.state.ledger.settle(outcome)

    def _why_rejected(self) -> str:
        if isinstance(self.error, OverLimit):
            return self.error.reason
        return self.error.code if isinstance(self.error, RequestRefused) else "internal_error"

    def _terminal(self) -> str:
        """The terminal state: rejected only when nothing was delivered; a stream that was cut short is an error."""
        is_computed = any(part.is_computed for part in self.parts)
        if isinstance(self.error, RequestRefused) and self.error.status != 500 and not is_computed:
            return "rejected"
        if self.error is not None:
            return "error"
        reasons = [choice.finished for part in self.parts for choice in part.choices]
        if any(reason is None or reason == "abort" for reason in reasons):
            return "abort"
        if "error" in reasons:
            return "error"
        return "stop" if "stop" in reasons else "length"
