"""A rank's lanes: threads that carry out transfers beside the steps, each lane in the order of the tickets.

Ops come from the rank's one channel (rank_server.py) and are handed to the lane of lane_of(), so a slow bucket holds up
nothing near. A transfer that fails is an answer too, never the end of the rank. Decides nothing about what moves.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from tandem.offload.copies.accelerator import Accelerator
from tandem.workers.messages.transfer import CopyKV, Failure, LaneKind, TransferOp, TransferResult, lane_of

log = logging.getLogger(__name__)
LANE_END_S = 2.0

Inbox = queue.SimpleQueue[TransferOp | None]
Answer = Callable[[TransferResult], None]
O_contra = TypeVar("O_contra", contravariant=True)


class Moved(NamedTuple):
    """The outcome of a lane's op. failed: indices of a CopyKV's blocks whose bytes did not arrive. failure: the reason
    of the last failure. pages: device pages that a fetched adapter takes."""

    failed: list[int]
    failure: Failure | None = None
    pages: int = 0


ALL_MOVED = Moved([])


class Lane(Protocol[O_contra]):
    """Moves the bytes of some kinds of ops."""

    def move(self, op: O_contra) -> Moved:
        """May raise: then all of it has failed."""
        ...

    def close(self) -> None: ...


class LaneThread(threading.Thread):
    """Carries out the ops of an inbox in order, until None comes. Several threads may share an inbox."""

    def __init__(self, rank: int, lane: Lane[Any], inbox: Inbox, answer: Answer, accelerator: Accelerator) -> None:
        super().__init__(name=type(lane).__name__, daemon=True)
        self._rank = rank
        self.lane = lane
        self.inbox = inbox
        self._answer = answer
        self._accelerator = accelerator

    def run(self) -> None:
        while (op := self.inbox.get()) is not None:
            self._answer(self._carry_out(op))

    def _carry_out(self, op: TransferOp) -> TransferResult:
        """Returns one op's answer. Never raises: what failed is in it."""
        started_s = time.perf_counter()
        try:
            self._accelerator.activate()  # in here: without its device the lane answers that it failed
            moved = self.lane.move(op)
        except Exception as problem:
            log.exception("transfer %d (%s) failed", op.ticket, type(op).__name__)
            failed = list(range(len(op.slots))) if isinstance(op, CopyKV) else []
            moved = Moved(failed, Failure("internal", f"{type(problem).__name__}: {problem}"))
        return TransferResult(
            rank=self._rank,
            ticket=op.ticket,
            failed=moved.failed,
            failure=moved.failure,
            copy_s=time.perf_counter() - started_s,
            pages=moved.pages,
        )


class Lanes:
    """All lanes of one rank. answer: called with each result, on the lane's thread."""

    def __init__(self, rank: int, answer: Answer) -> None:
        self._rank = rank
        self._answer = answer
        self._inboxes: dict[LaneKind, Inbox] = {}
        self._threads: list[LaneThread] = []
        self._later: dict[LaneKind, Callable[[], None]] = {}

    def __len__(self) -> int:
        """Number of threads."""
        return len(self._threads)

    def open(self, kind: LaneKind, accelerator: Accelerator, *lanes: Lane[Any]) -> None:
        """Starts a thread for each of `lanes`; each op of the kind goes to the first that is free."""
        inbox = self._inboxes[kind] = Inbox()
        for lane in lanes:
            thread = LaneThread(self._rank, lane, inbox, self._answer, accelerator)
            thread.start()
            self._threads.append(thread)

    def open_later(self, kind: LaneKind, open_lanes: Callable[[], None]) -> None:
        """Call what opens the lanes of a kind when its first op comes."""
        self._later[kind] = open_lanes

    def put(self, op: TransferOp) -> None:
        """Hands an op to its lane; returns at once. From one thread at a time."""
        kind = lane_of(op)
        if (open_lanes := self._later.pop(kind, None)) is not None:
            open_lanes()
        self._inboxes[kind].put(op)

    def close(self) -> None:
        """Ends the lanes after the ops that they have; a source or disk that hangs holds up nobody. Idempotent."""
        for thread in self._threads:
            thread.inbox.put(None)
        deadline_s = time.monotonic() + LANE_END_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):  # they share memory; what hangs may still use it
            for thread in self._threads:
                thread.lane.close()
        self._threads.clear()
        self._later.clear()
        self._inboxes.clear()
