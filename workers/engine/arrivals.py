"""A request becomes its choices: the sequences that the scheduler will run, or ends that need no step.

Called by the engine for each accepted request. Decides nothing about when they run.
"""

from workers.engine.block_manager import BlockManager
from workers.engine.sequence import RequestState, Sequence, Status
from workers.messages import FinishReason, GenerationRequest, TokenDelta


class Arrivals:
    """Numbers requests in the order in which they come. max_len: tokens that a sequence may have in all."""

    def __init__(self, manager: BlockManager, eos_token_ids: frozenset[int], max_len: int) -> None:
        self._manager = manager
        self._eos = eos_token_ids
        self._max_len = max_len
        self._count = 0

    def state_of(self, request: GenerationRequest, arrival_s: float) -> RequestState:
        """The request with its choices, all of them held."""
        state = RequestState(request, arrival_s)
        state.sequences = [self._choice(state, choice) for choice in range(request.sampling.n)]
        state.num_live = request.sampling.n
        state.held = list(state.sequences)
        self._count += 1
        return state

    def _choice(self, state: RequestState, choice: int) -> Sequence:
        request, params = state.request, state.request.sampling
        prompt = request.prompt_token_ids
        resumed = request.resume_token_ids[choice] if request.resume_token_ids else []
        eos = frozenset() if params.ignore_eos else self._eos
        digest = None if request.adapter is None else request.adapter.digest
        return Sequence(
            state=state,
            choice=choice,
            tokens=[*prompt, *resumed],
            prompt_len=len(prompt),
            max_len=min(len(prompt) + params.max_tokens, self._max_len),
            min_len=len(prompt) + params.min_tokens,
            stop_ids=eos.union(params.stop_token_ids),
            order=(request.priority, self._count, choice),
            table=self._manager.new_table(digest, request.cache_salt),
            adapter=digest,
            status=Status.HELD,
        )


def end_of(seq: Sequence) -> FinishReason | None:
    """Why a resumed choice needs no further token; None when it does."""
    if seq.num_output and seq.tokens[-1] in seq.stop_ids and len(seq.tokens) >= seq.min_len:
        return "stop"
    return "length" if len(seq.tokens) >= seq.max_len else None


def closing_delta(seq: Sequence, reason: FinishReason) -> TokenDelta:
    """The only delta of a choice that was complete when it came."""
    state = seq.state
    return TokenDelta(
        request_id=state.request.request_id,
        epoch=state.request.epoch,
        choice=seq.choice,
        first_position=seq.num_output,
        token_ids=[],
        finish_reason=reason,
        usage=state.usage() if state.num_live == 0 else None,
    )
