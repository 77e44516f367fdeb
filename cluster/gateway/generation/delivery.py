"""Delivery: runs a generation as an HTTP answer, whole or streamed, and watches for the client's leaving.

The status is decided by the first step or a refusal: nothing is sent before, but where a stream has been silent for
--sse-keep-alive-interval. All of it runs in the HTTP server's task, which waits for steps; the client's leaving and a
timer wake it too. Whatever ends it closes the generation, whose task does the rest. Next: the format of the API, for
chat openai/answers.py, and http/sse.py, which writes to the socket.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.cluster.gateway.generation.gateway_context import GatewayContext
from tandem.cluster.gateway.generation.generation import Generation, PartDeltas
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.gateway.generation.response_format import ChoiceAnswer, ResponseFormat, StreamFormat
from tandem.cluster.gateway.http.sse import EventWriter
from tandem.cluster.gateway.http.tasks import Aside
from tandem.workers.messages.errors import RequestRefused, TandemError
from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.text.choice_text import TextDelta

log = logging.getLogger("tandem.gateway")
TOKEN_BYTES, ENTRY_BYTES = 64, 112
"""A token with its piece of text, and a log probability, in Python's memory."""
LARGE_ANSWER_BYTES, LONG_ANSWER_CHARACTERS = 2**20, 8 * 1024
"""Bounds of an answer that is made on the loop. The worst tool calls take 6 us of CPU time a character."""


@dataclass
class Gathered:
    """A choice of an answer that is not streamed, while it grows."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None

    def add(self, addition: TextDelta) -> None:
        self.parts.append(addition.text)
        self.token_ids += addition.token_ids
        self.logprobs += addition.logprobs or ()
        self.offsets += addition.offsets or ()
        if addition.finish_reason is not None:
            self.finish_reason = addition.finish_reason
            self.stop_reason = addition.stop_reason

    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


class ClientLeft(Exception):
    """The client has left, or cannot be heard any more."""


class Delivery(Response):
    """An answer that is made while it is sent, and while its client is watched: it leaves, or does not read.

    style, stream: its format, whole, or None and that of its events. shown: choices to show per prompt (best_of runs
    more). is_streamable: it could be streamed; for the advice where it is too long. other_bytes: what it takes in
    memory beside the texts. before_end: is awaited once all is generated and formatted, before the end of the answer is
    sent; it may not take long.
    """

    _scope: Scope
    _leaving: Aside[None]
    _timer: asyncio.TimerHandle

    def __init__(
        self,
        context: GatewayContext,
        generation: Generation,
        style: ResponseFormat,
        *,
        stream: StreamFormat | None = None,
        include_usage: bool = False,
        shown: int = 1,
        with_logprobs: bool = False,
        is_streamable: bool = False,
        other_bytes: int = 0,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(b"")
        self._context = context
        self._generation = generation
        self._style = style
        self._stream = stream
        self._include_usage = include_usage
        self._shown = shown
        self._with_logprobs = with_logprobs
        self._is_streamable = is_streamable
        self._other_bytes = other_bytes
        self._before_end = before_end
        self._prompts: dict[int, list[TokenLogprobs]] = {}
        self._limit = asyncio.timeout(None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer. Returns early when the client leaves or stops reading."""
        writer = EventWriter(send, self._context.clock)
        self._scope = scope
        try:
            async with self._limit:
                await self._watched(receive, send, writer)
        except ClientLeft:
            pass
        except TimeoutError:
            if not self._limit.expired():
                raise
        finally:
            self._generation.close()

    async def _watched(self, receive: Receive, send: Send, writer: EventWriter) -> None:
        """Delivers while it watches: the client's leaving and a timer wake the reader of the generation."""
        self._leaving = Aside(disconnected(receive), self._generation.wake)
        self._on_timer(writer)
        try:
            self._leaving.advance()
            self._generation.start(partial(self._attend, writer))
            await self._deliver(send, writer)
        finally:
            self._timer.cancel()
            self._leaving.close()

    async def _attend(self, writer: EventWriter) -> None:
        """Raises ClientLeft when the client has left; else sends a comment if it has heard nothing for a while."""
        self._leaving.advance()
        if self._leaving.is_over:
            raise ClientLeft
        times = self._context.times
        if times.early_keep_alive and self._stream is not None:
            await writer.keep_alive_early(times.keep_alive_s)
        else:
            await writer.keep_alive(times.keep_alive_s)

    def _on_timer(self, writer: EventWriter) -> None:
        times, loop = self._context.times, asyncio.get_running_loop()
        if writer.stuck_for_s() > times.stuck_send_s:
            self._limit.reschedule(loop.time())
            return
        self._generation.wake()
        left_s = times.keep_alive_s - writer.silent_for_s()
        self._timer = loop.call_later(left_s if left_s > 0 else times.keep_alive_s, self._on_timer, writer)

    async def _deliver(self, send: Send, writer: EventWriter) -> None:
        if self._stream is None:
            await self._deliver_whole(send)
        else:
            await self._deliver_stream(writer, self._stream)

    def _take(self, step: PartDeltas) -> list[tuple[int, TextDelta]]:
        """Feeds one step to its choices, and stops choices in the engine where a stop string was found."""
        part, deltas = step
        additions = []
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                self._prompts.setdefault(part.first_choice, []).extend(delta.prompt_logprobs.entries)
                continue
            addition = part.choices[delta.choice].take(delta)
            if addition is None:
                continue
            additions.append((part.first_choice + delta.choice, addition))
            if addition.abort_at is not None:
                self._generation.stop_choice(part, delta.choice, addition.abort_at)
        return additions

    # ---- streamed ------------------------------------------------------------------------------------------------

    async def _deliver_stream(self, writer: EventWriter, style: StreamFormat) -> None:
        try:
            await self._write_steps(writer, style)
            if self._include_usage:
                events = style.usage_chunk(await self._generation.usage())
                await self._end()
                await writer.write(events)
        except Exception as error:
            if not writer.started or isinstance(error, ClientLeft):
                raise
            if not isinstance(error, TandemError):
                log.exception("request %s failed in its stream", self._generation.parts[0].request.public_id)
            self._scope["tandem.failed"] = True
            await writer.finish(style.closing(error))
            return
        await writer.finish(style.closing(None))

    async def _write_steps(self, writer: EventWriter, style: StreamFormat) -> None:
        chunk, opening = style.chunk, b""
        is_open = False
        async for step in self._generation.steps():
            additions = self._take(step)
            if not is_open:
                is_open = True
                opening = await self._open(writer, style)
            if len(additions) == 1:
                events = chunk(*additions[0])
            else:
                events = b"".join([chunk(index, addition) for index, addition in additions])
            if opening:
                events, opening = opening + events, b""
            if events:
                await writer.write(events)

    async def _open(self, writer: EventWriter, style: StreamFormat) -> bytes:
        """The first step has come: status and headers, unless a comment has been sent. Returns the events that open
        each choice."""
        self._first_token()
        if not writer.started:
            await writer.start()
        indices = [part.first_choice + i for part in self._generation.parts for i in range(len(part.choices))]
        return b"".join([style.opening(index) for index in indices])

    def _first_token(self) -> None:
        after_s = self._generation.first_token_s = self._context.clock() - self._generation.began_s
        self._context.metrics.first_token(after_s)

    # ---- whole ---------------------------------------------------------------------------------------------------

    async def _deliver_whole(self, send: Send) -> None:
        gathered: dict[int, Gathered] = {}
        held = characters = 0
        async for step in self._generation.steps():
            additions = self._take(step)
            if additions and not gathered:
                self._first_token()
            for index, addition in additions:
                gathered.setdefault(index, Gathered()).add(addition)
                held += held_bytes(addition)
                characters += len(addition.text)
            held += sum(entries_bytes(d.prompt_logprobs.entries) for d in step[1] if d.prompt_logprobs is not None)
            if held > self._context.max_answer_bytes:
                raise too_long(self._context.max_answer_bytes, is_streamable=self._is_streamable)
        usage = await self._generation.usage()
        chosen = [(part, entry) for part in self._generation.parts for entry in self._best(part, gathered)]
        answers = [self._answer(index, part, entry) for index, (part, entry) in enumerate(chosen)]
        if held + self._other_bytes > LARGE_ANSWER_BYTES or characters > LONG_ANSWER_CHARACTERS:
            body = await asyncio.to_thread(self._style.whole, answers, usage)
        else:
            body = self._style.whole(answers, usage)
        await self._end()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _end(self) -> None:
        if self._before_end is not None:
            await self._before_end()

    def _best(self, part: RequestPart, gathered: dict[int, Gathered]) -> Sequence[Gathered]:
        """The choices of one prompt to show: all, or with best_of those of the highest mean log probability."""
        entries = [gathered.get(part.first_choice + i, Gathered()) for i in range(len(part.choices))]
        if self._shown < len(entries):
            entries.sort(key=Gathered.mean_logprob, reverse=True)
        return entries[: self._shown]

    def _answer(self, index: int, part: RequestPart, entry: Gathered) -> ChoiceAnswer:
        return ChoiceAnswer(
            index=index,
            text="".join(entry.parts),
            token_ids=entry.token_ids,
            logprobs=entry.logprobs if self._with_logprobs else None,
            offsets=entry.offsets if self._with_logprobs else None,
            finish_reason=entry.finish_reason,
            stop_reason=entry.stop_reason,
            prompt_logprobs=self._prompts.get(part.first_choice, []),
        )


def held_bytes(addition: TextDelta) -> int:
    """Roughly what a delta takes in memory until the answer is sent."""
    return TOKEN_BYTES * len(addition.token_ids) + entries_bytes(addition.logprobs or ())


def entries_bytes(entries: Sequence[TokenLogprobs]) -> int:
    """The same of log probabilities."""
    return ENTRY_BYTES * sum(1 + len(entry.top) for entry in entries)


def too_long(limit: int, *, is_streamable: bool) -> RequestRefused:
    """The refusal of an answer that is not streamed and takes more than `limit` bytes of memory. is_streamable: whether
    the same answer could be streamed."""
    message = (
        f"The answer takes more than {limit} bytes of memory, the limit for one that is not streamed "
        f"(--max-answer-bytes). {'Stream it, or ask' if is_streamable else 'Ask'} for fewer tokens, choices or log "
        "probabilities."
    )
    return RequestRefused(message, code="content_too_large", status=413)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left, or cannot be heard any more."""
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
    except Exception as error:
        log.debug("a client is not heard any more: %s", type(error).__name__)
