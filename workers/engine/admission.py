"""Admission of requests: checks of one request, limits of the queue, deadlines.

Called by LiveRequests. Never touches blocks or rows. The order of waiting is in waiting/.
"""

import heapq
from dataclasses import dataclass

from tandem.configs.schema import SchedulerSettings
from tandem.offload.kv.kv_groups import UNLIMITED, KVGroups
from tandem.workers.engine.base.sequence import RequestState
from tandem.workers.messages.errors import ContextLengthExceeded, QueueFull, RequestRefused
from tandem.workers.messages.request import GenerationRequest


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the model for the engine."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_revision: str  # in the keys of its KV blocks, as is kv_dtype
    kv_dtype: str
    kv_groups: KVGroups | None = None  # its groups of layers; None: one without a window
    has_experts: bool = False

    def max_len(self, num_slots: int) -> int:
        """Returns the most tokens of a sequence, prompt and output, over a KV pool of so many tokens. The last token
        needs no KV."""
        return min(self.max_model_len, num_slots + 1)


class Deadlines:
    """Deadlines of waiting requests. deadline_s of a request is seconds from its acceptance by this engine:
    no clock is shared between machines, so each hop passes on what is left."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._count = 0

    def add(self, state: RequestState) -> None:
        if state.request.deadline_s is not None:
            self._count += 1
            heapq.heappush(self._heap, (state.arrival_s + state.request.deadline_s, self._count, state))

    def pop_expired(self, now_s: float) -> list[RequestState]:
        """Requests whose deadline has passed while they waited; those that ran or ended are dropped silently."""
        expired: list[RequestState] = []
        while self._heap and self._heap[0][0] <= now_s:
            state = heapq.heappop(self._heap)[2]
            if not state.admitted and state.num_live:
                expired.append(state)
        return expired


@dataclass(slots=True)
class _Waiting:
    """One tenant's requests in the queue."""

    num_requests: int = 0
    num_tokens: int = 0


class QueueLimits:
    """Counts requests (and their prompt tokens) that have never been given a row. A full queue still takes what fits a
    tenant's part, the limit over the tenants that wait, so that a flood of one does not fill it for the others; twice
    the limit in all is never passed. Requests that another group has accepted before pass uncounted."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._max_requests = settings.max_num_queued_reqs
        self._max_tokens = settings.max_num_queued_tokens
        self._tenants: dict[str, _Waiting] = {}
        self.num_requests = 0
        self.num_tokens = 0

    def enter(self, request: GenerationRequest) -> None:
        """Counts a request in, or raises QueueFull. An empty queue takes a request of any length."""
        if request.is_resumed:
            return
        tokens, own = len(request.prompt_token_ids), self._tenants.get(request.tenant, _Waiting())
        if not self._fits(self.num_requests, own.num_requests, 1, self._max_requests, own):
            raise QueueFull(f"{self.num_requests} requests wait already, the limit is {self._max_requests}")
        if self._max_tokens is not None and self.num_requests:
            taken = own.num_tokens if own.num_requests else -tokens  # a tenant's first may be of any length
            if not self._fits(self.num_tokens, taken, tokens, self._max_tokens, own):
                raise QueueFull(f"{self.num_tokens} prompt tokens wait already, the limit is {self._max_tokens}")
        self._tenants[request.tenant] = own
        own.num_requests += 1
        own.num_tokens += tokens
        self.num_requests += 1
        self.num_tokens += tokens

    def leave(self, request: GenerationRequest) -> None:
        """Counts out a request that enter() has let in."""
        if request.is_resumed:
            return
        own, tokens = self._tenants[request.tenant], len(request.prompt_token_ids)
        own.num_requests -= 1
        own.num_tokens -= tokens
        if not own.num_requests:
            del self._tenants[request.tenant]
        self.num_requests -= 1
        self.num_tokens -= tokens

    def _fits(self, total: int, taken: int, more: int, limit: int, own: _Waiting) -> bool:
        """Within the limit together, or within the tenant's part of it."""
        if total + more <= limit:
            return True
        num_tenants = len(self._tenants) + (not own.num_requests)
        return total + more <= 2 * limit and taken + more <= -(-limit // num_tenants)


def check_request(request: GenerationRequest, facts: ModelFacts, num_slots: int, has_adapters: bool) -> None:
    """Raises RequestRefused for what can never be served here. num_slots: tokens that the whole KV pool holds."""
    params, prompt = request.sampling, request.prompt_token_ids
    if not prompt:
        raise _invalid("the prompt has no tokens", "prompt")
    for ids, param in ((prompt, "prompt"), *((resumed, "prompt") for resumed in request.resume_token_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < facts.vocab_size:
            raise _invalid(f"token ids must lie in 0..{facts.vocab_size - 1}", param)
    if params.n < 1:
        raise _invalid("n must be at least 1", "n")
    if params.max_tokens < 0:
        raise _invalid("max_tokens must be at least 0", "max_tokens")
    if len(request.resume_token_ids) not in (0, params.n):
        raise _invalid(f"{len(request.resume_token_ids)} resumed choices, but n is {params.n}", "n")
    if request.adapter is not None and not has_adapters:
        raise RequestRefused("this group has no adapters enabled", code="model_not_found", status=404, param="model")
    check_fit(len(prompt), facts, num_slots, num_output=min(1, params.max_tokens))


def check_fit(prompt_len: int, facts: ModelFacts, num_slots: int, num_output: int = 1) -> None:
    """A prompt needs a KV slot for each of its tokens, and a position for an output token if it is continued."""
    fits = min(facts.max_model_len - num_output, num_slots)
    if prompt_len > fits:
        holds = "any number" if num_slots == UNLIMITED else num_slots
        raise ContextLengthExceeded(
            f"this model's context is {facts.max_model_len} tokens and its KV cache holds {holds}; the prompt has "
            f"{prompt_len} tokens, at most {fits} would fit",
            "prompt",
        )


def _invalid(message: str, param: str) -> RequestRefused:
    return RequestRefused(message, code="invalid_value", param=param)
