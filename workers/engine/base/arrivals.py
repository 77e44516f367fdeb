"""Creates the sequences of an accepted request, one for each choice, and ends choices that need no step.

Called by LiveRequests; the scheduler decides when they run.
"""

import hashlib

from tandem.workers.engine.base.sequence import RequestState, Sequence
from tandem.workers.engine.blocks.block_manager import BlockManager
from tandem.workers.messages.request import FinishReason, GenerationRequest, TokenDelta


class Arrivals:
    """Factory of RequestState, which numbers requests in order of arrival. max_len: most tokens of a sequence.
    takes_adapters: requests may name a LoRA adapter."""

    def __init__(
        self, manager: BlockManager, eos_token_ids: frozenset[int], max_len: int, *, takes_adapters: bool
    ) -> None:
        self.takes_adapters = takes_adapters
        self.num_slots = manager.num_slots  # tokens that the whole KV pool holds
        self._manager = manager
        self._eos = eos_token_ids
        self._max_len = max_len
        self._count = 0

    def state_of(self, request: GenerationRequest, arrival_s: float) -> RequestState:
        """Returns the request's state with all its choices. arrival_s: of the engine's clock."""
        state = RequestState(request, arrival_s)
        state.sequences = [self._choice(state, choice) for choice in range(request.sampling.n)]
        state.num_live = request.sampling.n
        state.grammar = None if request.sampling.grammar is None else digest_of(request.sampling.grammar)
        for seq in state.sequences:
            seq.grammar = state.grammar
        self._count += 1
        return state

    def _choice(self, state: RequestState, choice: int) -> Sequence:
        request, params = state.request, state.request.sampling
        prompt = request.prompt_token_ids
        resumed = request.resume_token_ids[choice] if request.resume_token_ids else []
        eos = frozenset() if params.ignore_eos else self._eos
        digest = None if request.adapter is None else request.adapter.digest
        table = self._manager.new_table(digest, request.cache_salt)
        table.finds_prefix = request.finds_prefix and not state.wants_prompt_logprobs
        return Sequence(
            state=state,
            choice=choice,
            tokens=[*prompt, *resumed],
            prompt_len=len(prompt),
            max_len=_max_len(request, self._max_len),
            min_len=len(prompt) + (0 if params.grammar is not None else params.min_tokens),
            stop_ids=eos.union(params.stop_token_ids),
            order=(request.priority, self._count, choice),
            table=table,
            adapter=digest,
            num_known=len(prompt) + len(resumed),
            num_charged=len(prompt) + len(resumed),
        )


def digest_of(grammar: str) -> str:
    """Returns the digest by which the ranks know a grammar."""
    return hashlib.sha256(grammar.encode()).hexdigest()


def _max_len(request: GenerationRequest, most: int) -> int:
    """Returns len(tokens) at which a choice ends. An embedding, and the end of a prompt that is not continued, take the
    place of one token, wherever the prompt ends."""
    if not request.sampling.max_tokens:
        return len(request.prompt_token_ids) + 1
    return min(len(request.prompt_token_ids) + request.sampling.max_tokens, most)


def end_of(seq: Sequence) -> FinishReason | None:
    """Returns why a resumed choice needs no further token, None if it needs one."""
    if seq.choice in seq.state.request.ended_choices:
        return "stop"
    if seq.num_output and seq.tokens[-1] in seq.stop_ids and len(seq.tokens) >= seq.min_len:
        return "stop"
    return "length" if len(seq.tokens) >= seq.max_len else None


def closing_delta(seq: Sequence, reason: FinishReason) -> TokenDelta:
    """Returns the only delta of a choice that was complete when it was resumed."""
    state = seq.state
    return TokenDelta(
        request_id=state.request.request_id,
        attempt=state.request.attempt,
        choice=seq.choice,
        first_position=seq.num_output,
        token_ids=[],
        finish_reason=reason,
        usage=state.usage() if state.num_live == 0 else None,
    )
