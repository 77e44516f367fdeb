"""A Dispatch without engines: a deterministic model that generates scripted outputs, by default the prompt again.

For tests and benchmarks of the gateway. Steps all running requests together, as an engine does; in manual mode only
when the test calls `step`, so that tests decide what happens when. Records every request and abort it was given.
"""

import asyncio
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.cluster.fleet.fleet_view import GroupRecord
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.cluster.gateway.generation.dispatch import DrainState
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.routing.route_table import RouteTable
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.request import (
    Abort,
    Ended,
    FinishReason,
    GenerationRequest,
    PromptLogprobs,
    TokenDelta,
    TokenLogprobs,
    Usage,
)

Script = Callable[[GenerationRequest, int], list[int]]


def echo_script(request: GenerationRequest, choice: int) -> list[int]:
    """The prompt over and over, from token `choice` on."""
    ids = request.prompt_token_ids
    return [ids[(choice + i) % len(ids)] for i in range(request.sampling.max_tokens)]


def fixed_script(*outputs: list[int]) -> Script:
    """Choice i says outputs[i % len(outputs)], whatever was asked."""
    return lambda request, choice: list(outputs[choice % len(outputs)])


def logprob_of(position: int) -> float:
    """The fake model's log probability of the token at an output position."""
    return -0.125 * (position % 8 + 1)


def embedding_of(request: GenerationRequest) -> list[float]:
    """The fake model's embedding: eight components, or as many as were asked for; exact in float32."""
    ids, pool = request.prompt_token_ids, request.pool
    assert pool is not None
    return [ids[i % len(ids)] + i / 8 for i in range(8)][: pool.dimensions]


@dataclass
class FakeChoice:
    """One choice: what it will say, how far it is, why it ended."""

    script: list[int]
    position: int = 0
    finish_reason: FinishReason | None = None
    billed: int = 0


class FakeStream:
    """Dispatch of a part that is fed by FakeBackend.step."""

    def __init__(self, backend: "FakeBackend", part: Any, choices: list[FakeChoice]) -> None:
        self.request: GenerationRequest = part.request
        self.part = part
        self.choices = choices
        self.has_row = False
        self.is_scored = False
        self._backend = backend

    def put(self, item: list[TokenDelta] | RequestRefused | GroupLost | None) -> None:
        """Deltas of a step, or the end: None, or why there is no other group for the request."""
        if isinstance(item, list):
            self.part.take(item)
            return
        ended = Ended(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            positions=[choice.billed for choice in self.choices],
            finish_reasons=[choice.finish_reason or "abort" for choice in self.choices],
            usage=self._backend.usage(self),
        )
        if isinstance(item, RequestRefused):
            ended = msgspec.structs.replace(ended, refused=(item.status, item.code, item.param, str(item)))
        elif isinstance(item, GroupLost):
            ended = msgspec.structs.replace(ended, refused=(503, "service_unavailable", None, str(item)))
        self.part.end(ended)


@dataclass
class FakeBackend:
    """See the module. `step_s` None: as fast as the loop turns; manual: only `step()` advances. num_drafts: those of
    every step, of which all tokens of the step but one are accepted ones."""

    script: Script = echo_script
    eos_token_ids: frozenset[int] = frozenset()
    tokens_per_step: int = 1
    num_drafts: int | None = None
    step_s: float | None = None
    manual: bool = False
    is_ready: bool = True
    sleeps: bool = False
    refuse: Exception | None = None
    lose_at_position: int | None = None
    fail_at_position: int | None = None
    fail_with: str = "the fake model failed"
    cached_tokens: int = 0
    logprob: Callable[[int, int], float] = lambda choice, position: logprob_of(position)
    requests: list[GenerationRequest] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)
    streams: dict[str, FakeStream] = field(default_factory=dict)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    hold_s: float = 3600.0
    num_resets: int = 0
    recordings: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    drained: list[tuple[str, float | None]] = field(default_factory=list)
    drain_states: dict[str, DrainState] = field(default_factory=dict)
    unconfirmed: tuple[str, ...] = ()
    explained: list[tuple[GenerationRequest, RouteHint]] = field(default_factory=list)
    table: RouteTable | None = None
    hints: list[RouteHint] = field(default_factory=list)
    route: str = "g1"  # the group that is noted where a request asks for it
    fleet: tuple[tuple[GroupRecord, GroupReport | None], ...] = ()
    more_metrics: str = ""
    _driver: "asyncio.Task[None] | None" = None

    def send(self, part: Any, hint: RouteHint) -> None:
        request = part.request
        self.requests.append(request)
        self.hints.append(hint)
        if part.route_note is not None:
            part.route_note.table, part.route_note.group = self.table, self.route
        self.submitted.set()
        if self.refuse is not None:
            raise self.refuse
        choices = [FakeChoice(self.script(request, i)) for i in range(request.sampling.n)]
        assert request.request_id not in self.streams, "request ids are unique"
        self.streams[request.request_id] = FakeStream(self, part, choices)
        if not self.manual and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    def cancel(self, part: Any) -> None:
        self.drop(part.request.request_id)

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        """There is no other group for what was refused."""
        return False

    def abort(self, abort: Abort) -> None:
        self.aborts.append(abort)
        self.aborted.set()
        stream = self.streams.get(abort.request_id)
        if stream is None:
            return
        deltas = []
        for index, choice in enumerate(stream.choices):
            if choice.finish_reason is None and abort.choice in (None, index):
                choice.finish_reason = "abort"
                keep = abort.keep_positions
                choice.billed = choice.position if keep is None else min(keep, choice.position)
                deltas.append(self._delta(stream, index, [], "abort"))
        self._send(stream, deltas)

    def ready(self) -> bool:
        return self.is_ready

    @property
    def is_asleep(self) -> bool:
        return self.sleeps

    def load(self) -> Mapping[str, float | int | str]:
        return {"num_requests_running": len(self.streams), "num_requests_waiting": 0}

    def route_table(self, request: GenerationRequest, hint: RouteHint) -> RouteTable:
        self.explained.append((request, hint))
        if self.table is None:
            raise RequestRefused("There is no group.", code="service_unavailable", status=503)
        return self.table

    async def groups(self) -> tuple[tuple[GroupRecord, GroupReport | None], ...]:
        return self.fleet

    async def reset_prefix_caches(self) -> Collection[str]:
        self.num_resets += 1
        return self.unconfirmed

    async def drain(self, target: str, timeout_s: float | None) -> DrainState:
        self.drained.append((target, timeout_s))
        if (state := self.drain_states.get(target)) is None:
            raise RequestRefused(f"There is no {target}.", code="not_found", status=404, param="target")
        return state

    async def record(self, group: str) -> Mapping[str, Any]:
        if (found := self.recordings.get(group)) is None:
            raise RequestRefused(f"There is no group {group}.", code="not_found", status=404, param="group")
        return found

    async def metrics(self, *, with_tenants: bool) -> str:
        del with_tenants
        own = f"# TYPE tandem:num_requests_running gauge\ntandem:num_requests_running {len(self.streams)}\n"
        return own + self.more_metrics

    # ---- the fake engine -----------------------------------------------------------------------------------------

    def step(self, steps: int = 1) -> None:
        """Advances every running choice by `steps` steps of tokens_per_step tokens."""
        for _ in range(steps):
            for stream in list(self.streams.values()):
                self._step_stream(stream)

    def begin(self) -> None:
        """Every request gets a row; no token comes yet."""
        for stream in self.streams.values():
            stream.has_row = True
            request = stream.request
            begun = TokenDelta(
                request_id=request.request_id,
                attempt=request.attempt,
                choice=0,
                first_position=0,
                token_ids=[],
                cached_tokens=self.cached_tokens,
            )
            stream.put([begun])

    def drop(self, request_id: str) -> None:
        self.streams.pop(request_id, None)

    async def _drive(self) -> None:
        while self.streams:
            self.step()
            await asyncio.sleep(self.step_s or 0)

    def _step_stream(self, stream: FakeStream) -> None:
        deltas = []
        stream.has_row = True
        if stream.request.sampling.prompt_logprobs is not None and not stream.is_scored:
            self._score(stream)
        for index, choice in enumerate(stream.choices):
            if choice.finish_reason is not None:
                continue
            if self.lose_at_position is not None and choice.position >= self.lose_at_position:
                self.drop(stream.request.request_id)
                stream.put(GroupLost("the fake group died"))
                return
            deltas.append(self._next(stream, index, choice))
        self._send(stream, deltas)

    def _score(self, stream: FakeStream) -> None:
        """The log probabilities of the prompt, three tokens at a time."""
        stream.is_scored = True
        request = stream.request
        wanted, ids = request.sampling.prompt_logprobs or 0, request.prompt_token_ids
        entries = [
            TokenLogprobs(ids[i], logprob_of(i), [(ids[i] + k, logprob_of(i) - k) for k in range(wanted)], 1)
            for i in range(1, len(ids))
        ]
        for first in range(0, len(entries), 3):
            chunk = PromptLogprobs(first + 1, entries[first : first + 3])
            stream.put([msgspec.structs.replace(self._delta(stream, 0, [], None), prompt_logprobs=chunk)])

    def _next(self, stream: FakeStream, index: int, choice: FakeChoice) -> TokenDelta:
        if stream.request.pool is not None:
            choice.finish_reason = "error" if self.fail_at_position is not None else "stop"
            vector = embedding_of(stream.request)
            embedding = struct.pack(f"<{len(vector)}f", *vector) if choice.finish_reason == "stop" else None
            return msgspec.structs.replace(self._delta(stream, index, [], choice.finish_reason), embedding=embedding)
        limit = stream.request.sampling.max_tokens
        ids = choice.script[choice.position : min(choice.position + self.tokens_per_step, limit)]
        ends = self.eos_token_ids | set(stream.request.sampling.stop_token_ids)
        stop_at = next((i for i, token_id in enumerate(ids) if token_id in ends), None)
        if stop_at is not None:
            ids = ids[: stop_at + 1]
        first, choice.position = choice.position, choice.position + len(ids)
        if self.fail_at_position is not None and choice.position > self.fail_at_position:
            choice.finish_reason = "error"
        elif stop_at is not None:
            choice.finish_reason = "stop"
        elif choice.position >= min(limit, len(choice.script)):
            choice.finish_reason = "length"
        choice.billed = choice.position
        return self._delta(stream, index, ids, choice.finish_reason, first)

    def _delta(
        self, stream: FakeStream, index: int, ids: list[int], reason: FinishReason | None, first: int | None = None
    ) -> TokenDelta:
        request, choice = stream.request, stream.choices[index]
        first = choice.position if first is None else first
        stop_id = ids[-1] if reason == "stop" and ids and ids[-1] not in self.eos_token_ids else None
        over = all(other.finish_reason is not None for other in stream.choices)
        last = over and (reason is not None) and not any(o.finish_reason is None for o in stream.choices)
        return TokenDelta(
            request_id=request.request_id,
            attempt=request.attempt,
            choice=index,
            first_position=first,
            token_ids=ids,
            logprobs=self._logprobs(request, index, ids, first),
            finish_reason=reason,
            stop_reason=stop_id,
            usage=self.usage(stream) if last else None,
            error=self.fail_with if reason == "error" else None,
            drafts=(self.num_drafts, len(ids) - 1) if self.num_drafts is not None and ids else None,
        )

    def _logprobs(
        self, request: GenerationRequest, choice: int, ids: list[int], first: int
    ) -> list[TokenLogprobs] | None:
        wanted = request.sampling.logprobs
        if wanted is None:
            return None
        entries = []
        for offset, token_id in enumerate(ids):
            best = self.logprob(choice, first + offset)
            top = [(token_id + i, best - i) if token_id + i < 500 else (i, best - i) for i in range(wanted)]
            entries.append(TokenLogprobs(token_id, best, top))
        return entries

    def usage(self, stream: FakeStream) -> Usage:
        return Usage(
            prompt_tokens=len(stream.request.prompt_token_ids) if stream.has_row else 0,
            completion_tokens=sum(choice.billed for choice in stream.choices),
            cached_tokens=self.cached_tokens,
        )

    def _send(self, stream: FakeStream, deltas: list[TokenDelta]) -> None:
        if deltas:
            stream.put(deltas)
        if all(choice.finish_reason is not None for choice in stream.choices):
            self.drop(stream.request.request_id)
            stream.put(None)
