"""TransferManager by itself: tickets, merged answers, deadlines in the time that this process ran."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from builders import FakeClock

from tandem.workers.engine.transfers.transfer_manager import STUCK_S, TransferManager, TransferOutcome
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.request import AdapterRef
from tandem.workers.messages.transfer import (
    CopyKind,
    CopyKV,
    DropAdapter,
    Failure,
    FetchAdapter,
    PlaceAdapter,
    TransferOp,
    TransferResult,
)

REF = AdapterRef(name="a", digest="d", source="s")


def copy(kind: CopyKind, count: int = 2) -> CopyKV:
    return CopyKV(kind=kind, slots=list(range(count)))


@dataclass
class Rig:
    """A manager of two ranks and what it has sent and said."""

    clock: FakeClock = field(default_factory=FakeClock)
    sent: list[TransferOp] = field(default_factory=list)
    outcomes: list[TransferOutcome] = field(default_factory=list)
    disk_failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = TransferManager(self.sent.append, 2, self.clock)

    def start(self, op: TransferOp, late_s: float = float("inf")) -> int:
        return self.manager.start(op, self.outcomes.append, late_s=late_s, on_disk_failure=self.disk_failures.append)

    def pass_seconds(self, seconds: int) -> list[int]:
        """A second a turn; the tickets that are late at last."""
        late: list[int] = []
        for _ in range(seconds):
            self.clock.now_s += 1.0
            late = self.manager.overdue()
        return late


def test_tickets_count_up_over_ops_of_all_kinds_and_are_sent_in_their_order():
    r = Rig()
    ops = [copy("store"), FetchAdapter(adapter=REF), copy("spill"), DropAdapter(adapter=REF), copy("load")]
    tickets = [r.start(op) for op in ops]
    assert tickets[0] > 0 and tickets == sorted(set(tickets))
    assert [op.ticket for op in r.sent] == tickets and [type(op) for op in r.sent] == [type(op) for op in ops]


def test_the_outcome_comes_once_when_every_rank_has_answered_and_merges_the_answers():
    r = Rig()
    first, second = r.start(copy("store", 4)), r.start(FetchAdapter(adapter=REF))
    r.manager.take(TransferResult(rank=1, ticket=first, failed=[2], failure=Failure("internal", "x"), copy_s=0.5))
    assert r.manager.is_open([first, 99]) and r.manager.is_busy and not r.outcomes
    r.manager.take(TransferResult(rank=0, ticket=first, failed=[0], failure=Failure("source", "y"), copy_s=0.25))
    (outcome,) = r.outcomes
    assert outcome.op == r.sent[0] and outcome.failed == {0, 2} and (outcome.copy_s, outcome.num_done) == (0.5, 0)
    assert outcome.failures == [Failure("internal", "x"), Failure("source", "y")] and outcome.failure is not None
    assert not r.manager.is_open([first]) and r.manager.is_open([second])
    for rank in (0, 1):
        r.manager.take(TransferResult(rank=rank, ticket=second, pages=3 - rank))
    assert (r.outcomes[1].pages, r.outcomes[1].num_done, r.outcomes[1].failure) == (3, 2, None)
    assert not r.manager.is_busy and len(r.outcomes) == 2


def test_the_owner_may_start_another_op_when_one_ends():
    r = Rig()
    again: Callable[[TransferOutcome], None] = lambda outcome: r.start(copy("spill")) and None  # noqa: E731
    ticket = r.manager.start(copy("store"), again)
    for rank in (0, 1):
        r.manager.take(TransferResult(rank=rank, ticket=ticket))
    assert r.manager.is_open([ticket + 1]) and not r.manager.is_open([ticket])


def test_a_disk_that_fails_on_one_rank_is_known_before_the_others_answer():
    r = Rig()
    ticket = r.start(copy("spill"))
    r.manager.take(TransferResult(rank=1, ticket=ticket, failed=[0, 1], failure=Failure("disk", "no space left")))
    assert r.disk_failures == ["no space left"] and not r.outcomes


def test_a_late_ticket_is_named_until_it_ends():
    r = Rig()
    r.pass_seconds(5)
    ticket, other = r.start(FetchAdapter(adapter=REF), late_s=3.0), r.start(FetchAdapter(adapter=REF))
    assert r.pass_seconds(3) == []
    assert r.pass_seconds(1) == [ticket] and r.pass_seconds(1) == [ticket]
    for rank in (0, 1):
        r.manager.take(TransferResult(rank=rank, ticket=ticket))
    assert r.pass_seconds(1) == [] and r.manager.is_open([other])


@pytest.mark.parametrize("op", [copy("store"), copy("load"), PlaceAdapter(adapter=REF, slot=0, pages=[1])])
def test_a_copy_in_memory_that_never_ends_loses_the_group(op: TransferOp):
    r = Rig()
    r.pass_seconds(30)
    ticket = r.start(op)
    r.manager.take(TransferResult(rank=0, ticket=ticket))
    r.pass_seconds(int(STUCK_S) - 1)
    r.clock.now_s += 1.0
    with pytest.raises(GroupLost, match=r"rank\(s\) \[1\] have not copied (2 KV blocks|adapter a) in 60 s"):
        r.manager.overdue()


@pytest.mark.parametrize("kind", ["spill", "fetch"])
def test_a_disk_that_never_answers_is_given_up_once(kind: CopyKind):
    r = Rig()
    ticket = r.start(copy(kind))
    r.pass_seconds(int(STUCK_S) - 1)
    assert not r.disk_failures
    r.pass_seconds(5)
    assert r.disk_failures == [f"a {kind} of 2 blocks has not ended in 60 s"] and r.manager.is_open([ticket])


def test_a_source_may_take_its_time():
    r = Rig()
    r.start(FetchAdapter(adapter=REF))
    assert r.pass_seconds(1000) == []


def test_time_in_which_this_process_was_stopped_does_not_count():
    r = Rig()
    r.start(copy("load"), late_s=2.0)
    r.clock.now_s += 10 * STUCK_S
    assert r.manager.overdue() == []
