"""AdapterMoves on their way to the ranks: one ticket each, over when every rank has answered.

Called by the adapter pool. Ticket numbers begin far above those of KV transfers (offload/tiered_store.py counts from
1), because the ranks' answers to both come through one door. Knows no policy.
"""

from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.adapter_memory import Place
from workers.messages import AdapterMove, AdapterMoveKind, AdapterRef, TransferDone

FIRST_TICKET = 1 << 40


@dataclass(slots=True, eq=False)
class Move:
    """One ticket: ranks that have not answered, and what the others said. pages: the most that any rank needs.
    is_passing: the error is not one of content. any_done: some rank did its part, whatever went wrong on others."""

    ticket: int
    kind: AdapterMoveKind
    ref: AdapterRef
    began_s: float
    awaiting: set[int]
    pages: int = 0
    error: str | None = None
    is_passing: bool = False
    any_done: bool = False


class AdapterMoves:
    """`send` hands an AdapterMove to every one of num_ranks ranks, each of which answers once."""

    def __init__(self, send: Callable[[AdapterMove], None], num_ranks: int, clock: Callable[[], float]) -> None:
        self._send = send
        self._ranks = range(num_ranks)
        self._clock = clock
        self._open: dict[int, Move] = {}
        self._next_ticket = FIRST_TICKET

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    @staticmethod
    def owns(ticket: int) -> bool:
        """Whether an answer to this ticket is for answer()."""
        return ticket >= FIRST_TICKET

    def start(self, kind: AdapterMoveKind, ref: AdapterRef, place: Place | None = None) -> Move:
        move = Move(self._next_ticket, kind, ref, self._clock(), set(self._ranks))
        self._next_ticket += 1
        self._open[move.ticket] = move
        slot, pages = (-1, []) if place is None else place
        self._send(AdapterMove(ticket=move.ticket, kind=kind, adapter=ref, slot=slot, pages=pages))
        return move

    def answer(self, message: TransferDone) -> Move | None:
        """One rank's answer; the move, when it was the last one."""
        move = self._open[message.ticket]
        move.awaiting.discard(message.rank)
        move.pages = max(move.pages, message.pages)
        move.any_done |= message.error is None
        if message.error is not None and move.error is None:
            move.error, move.is_passing = message.error, message.disk_error
        if move.awaiting:
            return None
        return self._open.pop(message.ticket)
