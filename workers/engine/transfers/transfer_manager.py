"""TransferManager: tickets and deadlines of all work beside the steps: moves of KV and adapters, grammars to compile.

Numbers each op, hands it to every rank, merges the ranks' answers and returns them to its owner (KVOffload,
AdapterCache or GrammarCache) when the last one has come. Owned by the engine's thread; knows no blocks or
adapters.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.workers.engine.base.running_clock import RunningClock
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.transfer import (
    CompileGrammar,
    CopyKV,
    DropGrammar,
    Failure,
    TransferOp,
    TransferResult,
    lane_of,
)

STUCK_S = 60.0
"""Seconds without the answer of a rank after which its memory lane is stuck, or its disk is given up."""
LONGEST_TICK_S = 1.0


@dataclass(slots=True, eq=False)
class TransferOutcome:
    """Merged answers of the ranks to one op. failed: indices that failed on some rank. failures: one for each rank that
    failed, in order of arrival. copy_s, pages: the most of any rank. num_done: ranks that report no failure.
    began_s: moment of the clock at which the op was sent."""

    op: TransferOp
    began_s: float
    failed: set[int] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    copy_s: float = 0.0
    pages: int = 0
    num_done: int = 0

    @property
    def failure(self) -> Failure | None:
        """The first failure."""
        return self.failures[0] if self.failures else None


OnDone = Callable[[TransferOutcome], None]
OnDiskFailure = Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Open:
    """A ticket in flight. awaiting: ranks that have not answered. began_s: in running time."""

    outcome: TransferOutcome
    awaiting: set[int]
    began_s: float
    late_s: float
    on_done: OnDone
    on_disk_failure: OnDiskFailure
    is_given_up: bool = False


def _ignore(reason: str) -> None:
    """The op needs no disk."""


class TransferManager:
    """Tickets of one group of num_ranks ranks. `send` hands an op to all of them.

    Tickets count up from 1 in the order of sending, so those of one lane are carried out in the order of their numbers.
    Time in which this process was stopped does not count for deadlines.
    """

    def __init__(self, send: Callable[[TransferOp], None], num_ranks: int, clock: Callable[[], float]) -> None:
        self._send = send
        self._ranks = range(num_ranks)
        self._clock = clock
        self._running = RunningClock(clock, LONGEST_TICK_S)
        self._open: dict[int, _Open] = {}
        self._next_ticket = 1

    # ---- queries ----

    @property
    def is_busy(self) -> bool:
        """True while tickets are open."""
        return bool(self._open)

    def is_open(self, tickets: Iterable[int]) -> bool:
        """Returns whether some rank has not answered one of the tickets yet."""
        return any(ticket in self._open for ticket in tickets)

    # ---- commands ----

    def start(
        self, op: TransferOp, on_done: OnDone, *, late_s: float = math.inf, on_disk_failure: OnDiskFailure = _ignore
    ) -> int:
        """Sends an op to all ranks under a new ticket, which it returns.

        on_done: called once, when every rank has answered. late_s: seconds after which overdue() names the ticket.
        on_disk_failure: called with the reason when a rank's disk fails, or does not answer for STUCK_S.
        """
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        numbered = msgspec.structs.replace(op, ticket=ticket)
        outcome = TransferOutcome(numbered, self._clock())
        awaiting = set(self._ranks)
        self._open[ticket] = _Open(outcome, awaiting, self._running.tick(), late_s, on_done, on_disk_failure)
        self._send(numbered)
        return ticket

    def take(self, result: TransferResult) -> None:
        """Applies one rank's answer; calls on_done if it is the last one."""
        opened = self._open[result.ticket]
        opened.awaiting.discard(result.rank)
        outcome, failure = opened.outcome, result.failure
        outcome.failed.update(result.failed)
        outcome.copy_s = max(outcome.copy_s, result.copy_s)
        outcome.pages = max(outcome.pages, result.pages)
        outcome.num_done += failure is None
        if failure is not None:
            outcome.failures.append(failure)
            if failure.kind == "disk":
                opened.on_disk_failure(failure.message)
        if not opened.awaiting:
            del self._open[result.ticket]
            opened.on_done(outcome)

    def overdue(self) -> list[int]:
        """Returns the open tickets that are late; they stay open. Called regularly while tickets are open.

        Gives up disks that do not answer. Raises GroupLost when a copy in memory never ends, as its blocks or pages can
        never be used again.
        """
        now_s = self._running.tick()
        for opened in self._open.values():
            if now_s - opened.began_s >= STUCK_S:
                self._give_up(opened)
        return [ticket for ticket, opened in self._open.items() if now_s - opened.began_s > opened.late_s]

    def _give_up(self, opened: _Open) -> None:
        op = opened.outcome.op
        if isinstance(op, CompileGrammar | DropGrammar):
            return  # nothing but its own requests waits for it (grammar_cache.py)
        lane = lane_of(op)
        what = f"{len(op.slots)} KV blocks" if isinstance(op, CopyKV) else f"adapter {op.adapter.name}"
        if lane in ("memory", "placement"):
            raise GroupLost(f"rank(s) {sorted(opened.awaiting)} have not copied {what} in {STUCK_S:.0f} s")
        if isinstance(op, CopyKV) and not opened.is_given_up:
            opened.is_given_up = True
            opened.on_disk_failure(f"a {op.kind} of {len(op.slots)} blocks has not ended in {STUCK_S:.0f} s")
