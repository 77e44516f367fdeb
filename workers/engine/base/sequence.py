"""State of one request and of each of its choices. Mutable, owned by the engine's thread.

Token counts of a sequence (positions from 0):

    0 ........ num_computed ....... num_scheduled ....... len(tokens) ......... num_known
      KV done,             KV in plans             known, not yet       samples in flight: a plan will
      result applied       in flight               scheduled            have produced these tokens

Every step closes a part of num_known - num_scheduled; prefill and decode differ in nothing else. With drafts, plans in
flight may bring up to num_drafts tokens more than that: both numbers then count what is certain, and move on with the
result.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from tandem.workers.engine.base.draft_record import DraftRecord
from tandem.workers.engine.blocks.block_manager import BlockTable
from tandem.workers.messages.course import Course
from tandem.workers.messages.request import IDLE_PRIORITY, Ended, FinishReason, GenerationRequest, Usage
from tandem.workers.messages.step import RowSampling


class SequenceStatus(Enum):
    """State of a sequence (docs/architecture.md): it waits (for what: waiting_queue.py), has a row, or has ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class StepMark(NamedTuple):
    """The steps of an engine up to a moment, as Phase has them between two."""

    steps: int
    rows: int
    tokens: int
    device_s: float


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. num_known, num_scheduled, num_computed, num_drafts: see the module."""

    state: "RequestState"
    choice: int
    tokens: list[int]  # prompt, then output
    prompt_len: int
    max_len: int  # len(tokens) at which it ends with "length" (max_tokens, context or KV pool)
    min_len: int  # len(tokens) below which no stop id ends it
    stop_ids: frozenset[int]
    order: tuple[int, int, int]  # (priority, arrival, choice), the smaller the earlier
    table: BlockTable
    adapter: str | None = None  # digest of its LoRA adapter
    grammar: str | None = None  # digest of the grammar that its output follows
    status: SequenceStatus = SequenceStatus.WAITING
    row: int = -1  # in the ranks' tables while RUNNING, else -1
    adapter_slot: int | None = None  # slot of its adapter on the device, in its present or last row
    num_known: int = 0
    num_scheduled: int = 0
    num_computed: int = 0
    num_drafts: int = 0
    drafting: DraftRecord = field(default_factory=DraftRecord)
    guesses: list[int] = field(default_factory=list)  # the next tokens behind `tokens`, as a rank guesses (PP > 1)
    num_sent: int = 0  # leading tokens that the ranks know (PP > 1)
    bound_step: int = 0  # the first plan of its present or last row, 0: it never had one
    last_step: int = 0  # the newest plan that names it
    num_loads: int = 0  # waits for a lower tier since it last lost its blocks
    void_until: int = 0  # results of plans up to this one are discarded: KV that they used did not arrive
    num_charged: int = 0  # leading tokens that its tenant was charged for or never will be
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    kept: int | None = None  # output tokens that are billed; None: all

    @property
    def tenant(self) -> str:
        return self.state.request.tenant

    @property
    def num_output(self) -> int:
        """Tokens generated so far, by an earlier group too."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_billed(self) -> int:
        """Output tokens that the request is billed for."""
        return self.num_output if self.kept is None else self.kept

    def num_scored(self, num_tokens: int) -> int:
        """Returns behind how many of the next num_tokens tokens stands one of the prompt whose log probability is
        still to be delivered."""
        if not self.state.wants_prompt_logprobs:
            return 0
        return max(0, min(num_tokens, self.prompt_len - 1 - self.num_scheduled))

    def row_sampling(self) -> RowSampling:
        """Returns the sampling parameters for the ranks; the ids masked before min_tokens are those that end it."""
        params = self.state.request.sampling
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
            choice=self.choice,
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(sorted(self.stop_ids)),
            logprobs=0 if params.logprobs is None and params.logprob_token_ids is not None else params.logprobs,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
            allowed_token_ids=params.allowed_token_ids,
            bad_words_token_ids=params.bad_words_token_ids,
            prompt_logprobs=params.prompt_logprobs,
            grammar=self.grammar,
            thinking_budget=params.thinking_budget,
            logprob_token_ids=params.logprob_token_ids,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """One accepted request."""

    request: GenerationRequest
    arrival_s: float  # of the engine's clock
    sequences: list[Sequence] = field(default_factory=list)
    num_live: int = 0  # choices that are not FINISHED
    admitted: bool = False  # some choice has had a row
    first_step_s: float | None = None  # when that was
    first_token_s: float | None = None  # when some choice got its first token here
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    is_cleared: bool = False  # it was suspect, ran alone, and nothing happened
    grammar: str | None = None  # digest of the grammar that its choices follow
    num_prompt_logprobs: int = 0  # prompt tokens whose log probabilities have been delivered
    waited_s: dict[str, float] = field(default_factory=dict)  # before its first step, by cause
    paused_s: float = 0.0  # without a row after that, of all choices
    num_preemptions: int = 0
    first_step: StepMark | None = None  # the engine's steps before it had a row
    first_token: StepMark | None = None  # those before it had a token
    course: Course | None = None  # set at its end

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while log probabilities of the prompt are still to be delivered."""
        request = self.request
        if request.sampling.prompt_logprobs is None:
            return False
        return self.num_prompt_logprobs < len(request.prompt_token_ids) - 1

    def usage(self) -> Usage:
        """Returns the billed counts so far: the prompt once, if a choice had a row here or elsewhere; kept output."""
        is_begun = self.admitted or self.request.begun or any(seq.num_output for seq in self.sequences)
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids) if is_begun else 0,
            completion_tokens=sum(seq.num_billed for seq in self.sequences),
            cached_tokens=self.cached_tokens,
        )

    def ended(self, refused: tuple[int, str, str | None, str] | None = None) -> Ended:
        """Returns the end of the request, all of whose choices are FINISHED. refused: as in Ended."""
        reasons = [seq.finish_reason for seq in self.sequences]
        assert all(reason is not None for reason in reasons), "a request ended before its choices"
        return Ended(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            positions=[seq.num_billed for seq in self.sequences],
            finish_reasons=[reason for reason in reasons if reason is not None],
            usage=self.usage(),
            refused=refused,
            course=self.course,
        )

    def fork_source(self, num_tokens: int, done_step: int) -> Sequence | None:
        """Returns a running choice whose first num_tokens tokens are computed, or None."""
        # only one whose first plan has returned: the prefix that it found may still be loading, and the load may fail
        for seq in self.sequences:
            if seq.status is SequenceStatus.RUNNING and seq.num_computed >= num_tokens and seq.bound_step <= done_step:
                return seq
        return None


def is_idle_work(seq: Sequence) -> bool:
    """Returns whether a sequence is for idle rows only, as a batch's line is. It gives way to all others, so whoever
    judges how much there is to do leaves it out."""
    return seq.order[0] >= IDLE_PRIORITY
