"""Probation: requests that may have ended a group run again one at a time, each at first alone in its steps.

So a request that ends its group again has done it by itself. Others are served in every second step meanwhile. A
request is cleared once each of its choices is a few tokens past where the group was lost. It leaves its turn to the
next while all it has waits for its adapter or KV. Called by the scheduler.
"""

from tandem.workers.engine.base.sequence import RequestState, Status

PROBATION_TOKENS = 4
"""More than a group can have computed without delivering it: with async scheduling two tokens of a choice."""


class Probation:
    """current: the request on probation. is_alone: the step that is being planned is its own."""

    def __init__(self) -> None:
        self.current: RequestState | None = None
        self.is_alone = False

    def may_run(self, state: RequestState) -> bool:
        """Returns whether sequences of this request may be queued now: it is no suspect, or no other has the turn."""
        return not _is_suspect(state) or self.current in (None, state)

    def begin(self, state: RequestState) -> None:
        """Notes that a sequence of this request, which may run, is queued: a suspect has the turn from now on."""
        if _is_suspect(state):
            self.current = state

    @property
    def is_over(self) -> bool:
        """Whether the request on probation has ended or is past where its group was lost."""
        state = self.current
        if state is None:
            return False
        resumed = state.request.resume_token_ids or [[]] * len(state.sequences)
        return all(
            seq.status is Status.FINISHED or seq.num_output - len(before) >= PROBATION_TOKENS
            for seq, before in zip(state.sequences, resumed, strict=True)
        )

    def end_turn(self) -> None:
        """Clears the request on probation if that is over; otherwise it needs another turn."""
        assert self.current is not None
        self.current.is_cleared = self.is_over
        self.current, self.is_alone = None, False

    def alternate(self) -> None:
        """Gives the step that is planned next to the request on probation, if the last one was the others'."""
        self.is_alone = self.current is not None and not self.is_alone

    def shares_step(self, state: RequestState) -> bool:
        """Returns whether sequences of this request may be in the step that is being planned."""
        return self.current is None or (state is self.current) is self.is_alone


def _is_suspect(state: RequestState) -> bool:
    return state.request.suspect and not state.is_cleared
