"""Probation: requests that may have ended a group run again one at a time, each at first alone in its steps.

So a request that ends its group again has done it by itself. Others are served in every second step meanwhile. A
request is cleared once each of its choices is a few tokens past where the group was lost. If none of its choices can
run now, as they wait for an adapter, a grammar or KV, it leaves the turn to the next suspect and gets another later.
Called by the scheduler, as the rule that makes other suspects wait, and to share out the steps.
"""

from collections.abc import Iterator

from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue

PROBATION_TOKENS = 4
"""More than a group can have computed without delivering it: with async scheduling two tokens of a choice."""


def probation_tokens(max_drafts: int) -> int:
    """Returns PROBATION_TOKENS of groups whose steps bring up to max_drafts tokens more (speculative decoding)."""
    return PROBATION_TOKENS + 2 * max_drafts


class Probation(AdmissionRule):
    """The turns of suspects. max_drafts: of a row in a step."""

    keeps_loaded = False

    def __init__(self, waiting: WaitingQueue, max_drafts: int = 0) -> None:
        self._num_tokens = probation_tokens(max_drafts)
        self.current: RequestState | None = None  # the request on probation
        self.is_alone = False  # the step that is being planned is its own
        self._waiting = waiting

    def before_queue(self, seq: Sequence) -> Awaited | None:
        """Implements AdmissionRule: a suspect waits while another one has the turn."""
        if not _is_suspect(seq.state) or self.current in (None, seq.state):
            return None
        return Awaited(Blocker.ALONE, seq.state)

    def check_invariants(self, running: list[Sequence]) -> None:
        """Asserts that a suspect waits for another one."""
        assert self.current is not None or not self._waiting.keys_of(Blocker.ALONE), "a suspect waits for nobody"

    def begin(self, state: RequestState) -> None:
        """Notes that a sequence of this request, which may run, is queued: a suspect has the turn from now on."""
        if _is_suspect(state):
            self.current = state

    def pass_turn(self) -> Iterator[Awaited]:
        """Ends the turn of a request that is cleared, has ended or cannot run. Yields the events that unblock the
        others, one request at a time, until one has the turn. A request that is not cleared needs another turn."""
        state = self.current
        if state is None or not (self._is_over(state) or self._cannot_run(state)):
            return
        state.is_cleared = self._is_over(state)
        self.current, self.is_alone = None, False
        while self.current is None and (held := self._waiting.keys_of(Blocker.ALONE)):
            yield Awaited(Blocker.ALONE, held[0])

    def switch_steps(self) -> None:
        """Gives the step that is planned next to the request on probation if the last one was the others', and the
        other way round."""
        self.is_alone = self.current is not None and not self.is_alone

    def shares_step(self, state: RequestState) -> bool:
        """Returns whether sequences of this request may be in the step that is being planned."""
        return self.current is None or (state is self.current) is self.is_alone

    def first_waiting(self) -> Sequence | None:
        """Returns the first in the queue if it may share the step; in a step of the request on probation, its first."""
        if self.is_alone:
            assert self.current is not None
            return next((seq for seq in self.current.sequences if self._waiting.tenants.is_queued(seq)), None)
        first = self._waiting.peek()
        return first if first is None or self.shares_step(first.state) else None

    def _is_over(self, state: RequestState) -> bool:
        """Returns whether the request has ended or is past where its group was lost."""
        resumed = state.request.resume_token_ids or [[]] * len(state.sequences)
        return all(
            seq.status is SequenceStatus.FINISHED or seq.num_output - len(before) >= self._num_tokens
            for seq, before in zip(state.sequences, resumed, strict=True)
        )

    def _cannot_run(self, state: RequestState) -> bool:
        """Returns whether no sequence of this request runs or is queued."""
        live = (seq for seq in state.sequences if seq.status is not SequenceStatus.FINISHED)
        return all(self._waiting.blocker_of(seq) is not None for seq in live)


def _is_suspect(state: RequestState) -> bool:
    return state.request.suspect and not state.is_cleared
