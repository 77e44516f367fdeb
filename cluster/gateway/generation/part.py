"""RequestPart: one prompt of a generation, its present attempt, and what outlives it: tokens, stopped choices, counts.

deltas of the present attempt --take--> not yet delivered ones --> the steps of the generation

A Dispatch sends it to a group and tells it what comes. Next: delivery.py, which reads the steps.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from tandem.cluster.gateway.http.tasks import Aside
from tandem.cluster.routing.route_table import RouteNote
from tandem.workers.messages.course import Course
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.refusals import lost
from tandem.workers.messages.request import (
    Abort,
    Ended,
    FinishReason,
    GenerationRequest,
    Loss,
    PromptLogprobs,
    TokenDelta,
    Usage,
)
from tandem.workers.messages.step import GRAMMAR_FAILED, NOTHING_LEFT
from tandem.workers.speculation.acceptance import DraftAcceptance
from tandem.workers.text.choice_text import TextDelta

AT_ONCE_S = 1.0
MOST_ATTEMPTS = 16
"""Attempts of a prompt that are noted for the record of its request."""


class AttemptNote(NamedTuple):
    """An attempt that is over. Moments of the monotonic clock; else as in GroupAttempt (records/request_record.py)."""

    group: str
    sent_s: float
    begun_s: float | None
    ended_s: float
    why: str
    course: Course | None


class Choice(Protocol):
    """Taker of one choice's deltas, which become its text (ChoiceText), or the embedding of its prompt
    (EmbeddingChoice)."""

    @property
    def tokens(self) -> int:
        """The tokens to bill."""
        ...

    @property
    def finished(self) -> FinishReason | None:
        """The reason for its end; None while it goes on."""
        ...

    def take(self, delta: TokenDelta) -> TextDelta | None:
        """Adds a delta; None where it adds no text."""
        ...


@dataclass(kw_only=True, eq=False)
class RequestPart:
    """One prompt, where its choices begin in the answer, how far they are, and its dispatch to one group."""

    # as it was sent last
    request: GenerationRequest
    choices: Sequence[Choice]
    first_choice: int
    # the client named no max_tokens, the request has what the context holds
    is_open_ended: bool = False
    # counts draft tokens of all groups, if asked for
    acceptance: DraftAcceptance | None = None
    # receives what is new
    on_step: Callable[[list[TokenDelta]], None] = lambda deltas: None
    # set by whatever its owner waits for
    news: asyncio.Event = field(default_factory=asyncio.Event)

    # names its session to the router (route_hint.session_key), "" without one
    session: str = ""
    # where the client asks why it goes where it goes
    route_note: RouteNote | None = None

    # ---- of all attempts ----
    # by choice that a stop string has ended, its output tokens
    kept: dict[int, int] = field(default_factory=dict)
    # found by the first group that has begun it, in its cache
    cached_tokens: int | None = None
    # some group has computed the prompt, or part of it
    is_begun: bool = False
    # the last delta has come
    is_complete: bool = False
    # since when each attempt has failed at once and without a row; None: the last one did not
    unserved_since_s: float | None = None
    # prompt tokens whose log probabilities have been delivered
    num_prompt_logprobs: int = 0
    # for the record of the request: (group, sent, begun, ended, why, course), of the monotonic clock
    attempts: list[AttemptNote] = field(default_factory=list)
    # by choice, as groups have sent them
    delivered: list[list[int]] = field(init=False)
    finished: list[bool] = field(init=False)

    # ---- of the present attempt ----
    # between a dispatch and its cancel()
    is_sent: bool = False
    has_row: bool = False
    is_aborted: bool = False
    # by choice, tokens delivered before it
    before: list[int] = field(init=False)
    # the group's answer. A lost group is a refusal with code GROUP_LOST, one that ends as planned one with GROUP_ENDED
    ended: Ended | None = None
    # Serve's response, and what becomes of it: advanced by the task that looks. None where the dispatch calls end()
    call: Any = None
    answer: Aside[Ended] | None = None
    # when it was told that it has a row, and the group's last words on it
    begun_s: float | None = None
    course: Course | None = None
    # the group's name on the token channel, once it has sent something; until then aborts are held
    sender: bytes | None = None
    held_aborts: list[Abort] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.delivered = [[] for _ in range(self.request.sampling.n)]
        self.finished = [False] * self.request.sampling.n
        self.before = [0] * self.request.sampling.n

    @property
    def open_choices(self) -> int:
        return sum([choice.finished is None for choice in self.choices])

    @property
    def has_new_tokens(self) -> bool:
        """True if the present attempt has delivered any."""
        return any(len(got) > before for got, before in zip(self.delivered, self.before, strict=True))

    @property
    def mean_tokens(self) -> int | None:
        """The tokens of a choice in the mean, when all have ended by themselves or by their limit; else None."""
        if not self.choices or any(choice.finished not in ("stop", "length") for choice in self.choices):
            return None
        return round(sum(choice.tokens for choice in self.choices) / len(self.choices))

    @property
    def was_cut(self) -> bool:
        """True if a choice has ended by its limit."""
        return any(choice.finished == "length" for choice in self.choices)

    def is_past(self, tokens: int) -> bool:
        """True if the present attempt has delivered so many tokens of each choice that has not ended."""
        return all(
            done or choice in self.kept or len(got) - before >= tokens
            for choice, (done, got, before) in enumerate(zip(self.finished, self.delivered, self.before, strict=True))
        )

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if log probabilities of its prompt are still to come."""
        if self.request.sampling.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs < len(self.request.prompt_token_ids) - 1

    @property
    def is_computed(self) -> bool:
        """True if its prompt is known to have been processed: a token came of it, or an end of its own."""
        return any(choice.tokens or choice.finished in ("stop", "length") for choice in self.choices)

    # ---- from the dispatch ----

    def take(self, deltas: list[TokenDelta]) -> bool:
        """Takes all deltas of one step. False when tokens before one of them are missing; then none of them is taken:
        the other tokens would count as delivered in the next group, and the reader would not get them."""
        if len(deltas) == 1 and self._goes_on(deltas[0]):
            self.on_step(deltas)
            if self.is_aborted:
                self.news.set()
            return True
        ends: dict[int, int] = {}
        scored = self.num_prompt_logprobs
        for delta in deltas:
            if (got := delta.prompt_logprobs) is not None:
                if got.first_position > scored + 1:
                    return False
                scored = max(scored, got.first_position + len(got.entries) - 1)
                continue
            have = ends.get(delta.choice, len(self.delivered[delta.choice]))
            if delta.first_position > have:
                return False
            ends[delta.choice] = max(have, delta.first_position + len(delta.token_ids))
        fresh = [trimmed for delta in deltas if (trimmed := self._take_one(delta)) is not None]
        if any(delta.token_ids for delta in deltas):
            self._begin(None)
        if fresh:
            self.on_step(fresh)
        if self.is_complete or self.is_aborted:
            self.news.set()
        return True

    def _goes_on(self, delta: TokenDelta) -> bool:
        """Takes the next tokens of a choice that goes on, which is most of what comes. False for all else."""
        if delta.finish_reason is not None or delta.usage is not None or delta.cached_tokens is not None:
            return False
        if delta.prompt_logprobs is not None or delta.drafts is not None or not delta.token_ids:
            return False
        delivered = self.delivered[delta.choice]
        if delta.first_position != len(delivered) or self.finished[delta.choice]:
            return False
        delivered += delta.token_ids
        self._begin(None)
        return True

    def end(self, ended: Ended) -> None:
        """Ends the attempt, unless it has ended. The answer may overtake the last deltas."""
        if self.ended is None:
            self.ended = ended
            self.news.set()

    def lose(self, message: str, loss: Loss) -> None:
        """Gives its group up."""
        self.end(lost(self.request, message, loss))

    def _take_one(self, delta: TokenDelta) -> TokenDelta | None:
        """Returns what is new in a delta, now delivered; None when nothing is."""
        if delta.cached_tokens is not None:
            self.begun_s = time.monotonic()
            self._begin(delta.cached_tokens)
            return None
        if delta.prompt_logprobs is not None:
            self._begin(None)
            return self._scores(delta, delta.prompt_logprobs)
        trimmed = self._trimmed(delta)
        if trimmed is not None:
            self.delivered[delta.choice].extend(trimmed.token_ids)
            self.finished[delta.choice] |= trimmed.finish_reason is not None
            if trimmed.usage is not None:
                self.course = trimmed.course
                self._settle(trimmed.usage)
            if self.acceptance is not None and trimmed.drafts is not None:
                self.acceptance.add(*trimmed.drafts)
        return trimmed

    def _scores(self, delta: TokenDelta, got: PromptLogprobs) -> TokenDelta | None:
        """The log probabilities of prompt tokens that no earlier group has delivered; None when there are none."""
        first = self.num_prompt_logprobs + 1
        entries = got.entries[first - got.first_position :]
        if not entries:
            return None
        self.num_prompt_logprobs += len(entries)
        return msgspec.structs.replace(delta, prompt_logprobs=PromptLogprobs(first, entries))

    def _trimmed(self, delta: TokenDelta) -> TokenDelta | None:
        """Without the tokens that were delivered before (another group sent them); None when nothing is new."""
        if self.finished[delta.choice]:
            if delta.usage is None:
                return None
            return msgspec.structs.replace(delta, token_ids=[], logprobs=None, finish_reason=None)
        known = len(self.delivered[delta.choice]) - delta.first_position
        if known == 0:
            return delta
        logprobs = delta.logprobs[known:] if delta.logprobs is not None else None
        rest = delta.token_ids[known:]
        if not rest and delta.finish_reason is None and delta.usage is None:
            return None
        first = delta.first_position + min(known, len(delta.token_ids))
        return msgspec.structs.replace(delta, first_position=first, token_ids=rest, logprobs=logprobs)

    def _begin(self, cached_tokens: int | None) -> None:
        """Its prompt is computed from now on, and billed, once."""
        self.has_row = True
        if not self.is_begun:
            self.is_begun = True
            self.cached_tokens = cached_tokens

    def _settle(self, usage: Usage) -> None:
        self.is_complete = True
        self.is_begun |= usage.prompt_tokens > 0
        if self.cached_tokens is None and usage.prompt_tokens:
            self.cached_tokens = usage.cached_tokens

    # ---- from its owner ----

    def begin_attempt(self) -> None:
        """Expects the deltas of self.request from now on."""
        self.is_sent = True
        self.has_row = self.is_aborted = False
        self.before = [len(tokens) for tokens in self.delivered]
        self.ended = self.call = self.answer = self.sender = self.begun_s = self.course = None
        self.held_aborts = []

    async def wait(self, timeout_s: float | None) -> bool:
        """Waits for news; False when there were none."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        except TimeoutError:
            return False
        self.news.clear()
        return True

    def look(self) -> Ended | None:
        """Returns the group's answer, None while there is none; for the task of the owner only, at once and whenever
        there is news."""
        if self.answer is not None and not self.answer.is_over:
            ended = self.answer.advance()
            if ended is not None:
                self.end(ended)
        return self.ended

    def aborted(self, choice: int | None) -> Abort:
        """Notes an abort of a choice, or of all, in the present attempt; returns it, to be sent."""
        self.is_aborted = True
        request, keep = self.request, None if choice is None else self.kept[choice]
        return Abort(request_id=request.request_id, attempt=request.attempt, choice=choice, keep_positions=keep)

    def note_service(self, sent_s: float, now_s: float) -> None:
        """Notes that an attempt that was sent at sent_s has failed now."""
        if self.has_row or now_s - sent_s > AT_ONCE_S:
            self.unserved_since_s = None
        elif self.unserved_since_s is None:
            self.unserved_since_s = sent_s

    def note_attempt(self, sent_s: float, now_s: float) -> None:
        """Notes the attempt that is over now, for the record of the request."""
        ended = None if self.is_complete else self.ended
        group = self.sender.decode(errors="replace").rpartition(":")[0] if self.sender is not None else ""
        if ended is not None and ended.group:
            group = ended.group
        why = "" if ended is None or ended.refused is None else ended.loss or ended.refused[1]
        course = self.course if ended is None or ended.course is None else ended.course
        if len(self.attempts) < MOST_ATTEMPTS:
            self.attempts.append(AttemptNote(group, sent_s, self.begun_s, now_s, why, course))

    def has_all(self, ended: Ended) -> bool:
        """True when every token that Ended counts was delivered, or the embedding, and what was asked of the prompt."""
        if self.request.pool is not None and ended.finish_reasons == ["stop"] and not self.finished[0]:
            return False
        if self.wants_prompt_logprobs and any(reason in ("stop", "length") for reason in ended.finish_reasons):
            return False
        return all(len(got) >= want for got, want in zip(self.delivered, ended.positions, strict=False))

    def finish(self, ended: Ended) -> None:
        """Ends with the group's answer, when the last delta did not or will not come."""
        if self.is_complete:
            return
        self.course = ended.course
        closing = self._closing_deltas(ended)
        self._settle(ended.usage)
        self.on_step(closing)

    def failure(self, delta: TokenDelta) -> RequestRefused:
        """Makes the refusal of a request with a row that has failed on the ranks: 400 if its own parameters leave no
        token, else 500."""
        message = delta.error or "The request failed in the engine."
        if delta.error == NOTHING_LEFT:
            param = None if self.request.sampling.allowed_token_ids is None else "allowed_token_ids"
            return RequestRefused(message, code="invalid_value", param=param)
        if message.startswith(GRAMMAR_FAILED):
            return RequestRefused(message, code="invalid_grammar")
        return RequestRefused(message, code="internal_error", status=500)

    def next_request(self, deadline_s: float | None, *, is_suspect: bool) -> None:
        """Makes the request for another group. Tokens delivered count as generated, of a stopped choice those that are
        kept. deadline_s: what is left of its time in the queue."""
        sampling = self.request.sampling
        if not self.wants_prompt_logprobs and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        self.request = msgspec.structs.replace(
            self.request,
            sampling=sampling,
            attempt=self.request.attempt + 1,
            resume_token_ids=[tokens[: self.kept.get(i)] for i, tokens in enumerate(self.delivered)],
            ended_choices=[i for i, done in enumerate(self.finished) if done or i in self.kept],
            begun=self.is_begun,
            suspect=is_suspect,
            deadline_s=deadline_s,
        )

    def _closing_deltas(self, ended: Ended) -> list[TokenDelta]:
        """An empty delta for each choice that had no end yet; the last one carries the usage."""
        open_choices = [i for i, done in enumerate(self.finished) if not done] or [len(self.finished) - 1]
        last = open_choices[-1]
        return [
            TokenDelta(
                request_id=self.request.request_id,
                attempt=ended.attempt,
                choice=choice,
                first_position=len(self.delivered[choice]),
                token_ids=[],
                finish_reason=None if self.finished[choice] else ended.finish_reasons[choice],
                usage=ended.usage if choice == last else None,
            )
            for choice in open_choices
        ]


def terminal_state(parts: Sequence[RequestPart], error: Exception | None) -> str:
    """The state in which a request of these parts ends: rejected only when nothing was delivered; a stream that was cut
    short is an error."""
    is_computed = any(part.is_computed for part in parts)
    if isinstance(error, RequestRefused) and error.status != 500 and not is_computed:
        return "rejected"
    if error is not None:
        return "error"
    reasons = [choice.finished for part in parts for choice in part.choices]
    if any(reason is None or reason == "abort" for reason in reasons):
        return "abort"
    if "error" in reasons:
        return "error"
    return "stop" if "stop" in reasons else "length"
