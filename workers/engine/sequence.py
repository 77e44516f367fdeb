"""What the engine knows of one request and of each of its choices. Mutable, with one owner: the engine's thread.

Token counts of a sequence (positions from 0):

    0 ........ num_computed ....... num_scheduled ....... len(tokens) ......... num_known
      KV done,             KV in plans             known, not yet       samples in flight: a plan will
      result applied       in flight               scheduled            have produced these tokens

Every step closes some of num_known - num_scheduled; there is no other notion of prompt or decode phase.
"""

from dataclasses import dataclass, field
from enum import Enum

from workers.engine.block_manager import BlockTable
from workers.messages import Ended, FinishReason, GenerationRequest, RowSampling, Usage


class Status(Enum):
    """HELD: waits for the prompt that another choice computes. UNPLACED: waits for its adapter to be on the device.
    LOADING: waits for KV that comes up from a lower tier. PREEMPTED: lost its blocks, waits to compute or load them
    again."""

    HELD = "held"
    UNPLACED = "unplaced"
    LOADING = "loading"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TERMINAL = frozenset({Status.FINISHED})
QUEUED = frozenset({Status.WAITING, Status.PREEMPTED})
WAITS = QUEUED | {Status.UNPLACED, Status.LOADING}


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request.

    tokens: prompt, then output. max_len: len(tokens) at which it ends with "length" (max_tokens, context or KV pool).
    min_len: len(tokens) below which no stop id ends it. order: (priority, arrival, choice), the smaller the earlier.
    row: its place in the ranks' tables while running. num_sent: leading tokens that the ranks know (PP > 1).
    bound_step, last_step: the first plan of its present row (0: never had one), the newest plan that names it.
    void_until: results of plans up to this one are not its own (their KV did not arrive).
    num_loads: how often it waited for a lower tier since it last lost (or never had) its blocks.
    adapter: the digest of its adapter. num_charged: leading tokens whose cost its tenant was charged or never will be.
    kept: output tokens that are billed; None means all.
    """

    state: "RequestState"
    choice: int
    tokens: list[int]
    prompt_len: int
    max_len: int
    min_len: int
    stop_ids: frozenset[int]
    order: tuple[int, int, int]
    table: BlockTable
    adapter: str | None = None
    status: Status = Status.WAITING
    row: int = -1
    num_known: int = 0
    num_scheduled: int = 0
    num_computed: int = 0
    num_sent: int = 0
    bound_step: int = 0
    last_step: int = 0
    num_loads: int = 0
    void_until: int = 0
    num_charged: int = 0
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    kept: int | None = None

    @property
    def tenant(self) -> str:
        return self.state.request.tenant

    @property
    def num_output(self) -> int:
        """Tokens generated so far, those of an earlier group included."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_billed(self) -> int:
        return self.num_output if self.kept is None else self.kept

    def row_sampling(self) -> RowSampling:
        """What ranks need to sample this choice. The masked ids are those that would end it (design: min_tokens)."""
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
            logprobs=params.logprobs,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=params.logit_bias,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """One accepted request. `held`: choices that wait until another has computed the prompt that they will fork."""

    request: GenerationRequest
    arrival_s: float
    sequences: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    num_live: int = 0
    admitted: bool = False
    cached_tokens: int = 0

    def usage(self) -> Usage:
        """The bill so far: the prompt once, from its first row on (here or in the group before); what choices keep."""
        is_begun = self.admitted or any(seq.num_output for seq in self.sequences)
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids) if is_begun else 0,
            completion_tokens=sum(seq.num_billed for seq in self.sequences),
            cached_tokens=self.cached_tokens,
        )

    def ended(self, refused: tuple[int, str, str | None, str] | None = None) -> Ended:
        """The request's one answer; every choice is in a terminal state."""
        reasons = [seq.finish_reason for seq in self.sequences]
        assert all(reason is not None for reason in reasons), "a request ended before its choices"
        return Ended(
            request_id=self.request.request_id,
            epoch=self.request.epoch,
            positions=[seq.num_billed for seq in self.sequences],
            finish_reasons=[reason for reason in reasons if reason is not None],
            usage=self.usage(),
            refused=refused,
        )

    def fork_source(self, num_tokens: int, done_step: int) -> Sequence | None:
        """A running choice whose first num_tokens tokens are computed, to share its blocks.

        Only one whose first plan has returned: the KV that it found may be coming up still, and may fail to.
        """
        for seq in self.sequences:
            if seq.status is Status.RUNNING and seq.num_computed >= num_tokens and seq.bound_step <= done_step:
                return seq
        return None
