"""Blocks of a prompt, chunk by chunk: reserved when it is admitted, findable by others until it takes them, given back
once; seeded defects of that do not get past the state machines."""

from typing import Any

import block_machine
import pytest
import tier_machine
from builders import Harness, assert_as_expected, filled, harness, request
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from prompt_machine import PromptMachine

from tandem.workers.engine.base.sequence import Sequence
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.blocks.block_pool import BlockPool
from tandem.workers.engine.running_rows import RunningRows
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.messages.request import Abort
from tests.support.engine_invariants import check_invariants

HUNT = settings(
    max_examples=4000, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate], database=None
)
LOST = "reserved blocks are not the sum of the tables' reservations"
MODES = [
    pytest.param({"asynchronous": False}, id="depth1"),
    pytest.param({"asynchronous": True}, id="async"),
    pytest.param({"stages": 2}, id="pp2"),
]


def assert_caught(machine: type[RuleBasedStateMachine], because: str) -> None:
    with pytest.raises(AssertionError, match=because):
        run_state_machine_as_test(machine, settings=HUNT)


# ---- the manager ----


def manager(num_blocks: int = 8) -> BlockManager:
    return BlockManager(num_blocks, 2, model_revision="m", kv_dtype="d")


def test_reserved_blocks_are_nobody_elses_and_taken_as_they_are_needed():
    m = manager()
    prompt, other = m.new_table(None, ""), m.new_table(None, "")
    assert m.admit(prompt, 11)
    assert (prompt.block_ids, prompt.num_reserved, m.pool.num_allocatable, m.pool.num_used) == ([], 6, 2, 0)
    assert not m.admit(other, 5) and filled(m, other, 4) and m.extend(other, 5) is None
    taken = [m.take_reserved(prompt, num_tokens) for num_tokens in (3, 4, 8, 11)]
    assert [len(blocks) for blocks in taken] == [2, 0, 2, 2]
    assert prompt.block_ids == [block_id for blocks in taken for block_id in blocks]
    assert (prompt.num_reserved, m.pool.num_reserved, m.pool.num_allocatable) == (0, 0, 0)
    m.check_invariants([prompt, other])


def test_what_is_cached_is_found_until_a_chunk_takes_it():
    m, tokens = manager(num_blocks=4), [1, 2, 3, 4, 5, 6, 7]
    gone, prompt = m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, gone, 8)
    m.commit(gone, tokens, 6)
    m.release(gone, 0)
    assert m.admit(prompt, 7) and m.pool.num_allocatable == 0
    found = []
    for num_tokens in (2, 3, 5, 7):
        m.take_reserved(prompt, num_tokens)
        found.append(len(m.match_prefix(m.new_table(None, ""), tokens)))
    assert found == [3, 2, 1, 0], "the free one first, then the tail"


def test_hits_that_somebody_has_reserved_cannot_be_had():
    m, tokens = manager(num_blocks=4), [1, 2, 3, 4, 5]
    gone, prompt, finds = m.new_table(None, ""), m.new_table(None, ""), m.new_table(None, "")
    assert filled(m, gone, 5)
    m.commit(gone, tokens, 5)
    m.release(gone, 0)
    assert m.admit(prompt, 4)
    hits = m.match_prefix(finds, tokens)
    assert len(hits) == 2 and not m.admit(finds, 5, hits)
    m.release(prompt, 0)
    assert m.admit(finds, 5, hits) and finds.block_ids == hits
    m.check_invariants([prompt, finds])


def test_the_rest_of_a_reservation_is_given_back_once():
    m = manager()
    prompt, other = m.new_table(None, ""), m.new_table(None, "")
    assert m.admit(prompt, 9) and m.admit(other, 5) and m.take_reserved(prompt, 4)
    m.release(prompt, 7)
    m.release(prompt, 7)
    assert (m.pool.num_reserved, m.pool.num_allocatable, m.pool.num_pending) == (3, 3, 2)
    m.check_invariants([prompt, other])


def test_a_reservation_is_topped_up_and_a_later_token_takes_from_everybody():
    m = manager(num_blocks=5)
    table = m.new_table(None, "")
    assert m.reserve(table, 3) and m.reserve(table, 5) and m.reserve(table, 5) and not m.reserve(table, 11)
    assert table.num_reserved == m.pool.num_reserved == 3
    added = m.extend(table, 7)
    assert added is not None and len(added) == 4 and (table.num_reserved, m.pool.num_reserved) == (0, 0)
    assert m.extend(table, 12) is None and m.pool.num_allocatable == 1


def test_a_chunk_beyond_the_reservation_is_refused():
    m = manager()
    table = m.new_table(None, "")
    assert m.admit(table, 4)
    with pytest.raises(AssertionError, match="a chunk takes 3 blocks, 2 are reserved"):
        m.take_reserved(table, 5)


def test_a_promise_binds_those_who_promise_and_ends_once():
    m = manager()
    first, second, runs = (m.new_table(None, "") for _ in range(3))
    assert not m.promise(first, 12, reserve=3) and m.promise(first, 12, reserve=2)
    assert not m.promise(second, 6, reserve=0) and m.promise(second, 4, reserve=0)
    assert (m.num_promised, m.pool.num_allocatable) == (8, 8) and m.admit(runs, 16)
    m.check_invariants([first, second, runs])
    m.withdraw_promise(first)
    m.withdraw_promise(first)
    assert m.num_promised == second.num_promised == 2
    m.check_invariants([first, second, runs])


# ---- the engine ----


def step_until(h: Harness, num_steps: int) -> None:
    for _ in range(num_steps):
        h.step()


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_in_chunks_leaves_what_others_find(mode):
    """16 blocks: an ended request has left 6 of them, and a prompt of 13 blocks is computed in chunks of 2."""
    first = request("first", 25, 2)
    second = request("second", first.prompt_token_ids, 2)
    h = harness(**mode, num_blocks=20, max_num_batched_tokens=8)
    h.add(first)
    h.run()
    long = request("long", 50, 2)
    h.add(long)
    h.step()
    stats = h.engine.stats()
    assert stats.reserved_blocks > 0 and stats.cached_blocks == 6
    h.add(second)
    h.run()
    assert h.sink.begun["second"] == 24
    assert_as_expected(h, first, long, second)


@pytest.mark.parametrize("mode", MODES)
def test_a_prompt_that_was_admitted_preempts_nobody(mode):
    """The pool is exactly as large as both need; a small one beside them does not fit and waits."""
    h = harness(**mode, num_blocks=14, max_num_batched_tokens=6)
    first, long, small = request("f", 3, 1), request("l", 48, 1), request("s", 9, 1)
    h.add(first, long, small)
    h.step()
    while h.engine.stats().reserved_blocks:
        assert h.states("s")[0].value == "waiting"
        h.step()
    h.run()
    assert h.engine.stats().preemptions == 0
    assert_as_expected(h, first, long, small)


@pytest.mark.parametrize("mode", MODES)
def test_a_last_chunk_of_one_token_takes_its_reserved_block(mode):
    """It is planned as a decode is."""
    h = harness(**mode, num_blocks=6, max_num_batched_tokens=4)
    long, other = request("l", 13, 1), request("o", 5, 3)
    h.add(long)
    h.step()
    h.add(other)
    h.run()
    tails = [work for plan in h.executor.plans[:4] for work in plan.work if work.row == 0]
    assert [len(work.new_block_ids) for work in tails] == [1, 1, 1, 1] and tails[3].num_tokens == 1
    assert h.engine.stats().preemptions == 0
    assert_as_expected(h, long, other)


@pytest.mark.parametrize("mode", MODES)
def test_chunks_of_failed_steps_take_no_blocks_again(mode):
    """The third step finds too little memory: its chunk is planned again in smaller ones, over the blocks it has."""
    h = harness(**mode, max_num_batched_tokens=8, room=lambda step_id: 4 if step_id == 3 else float("inf"))
    long = request("l", 60, 4)
    h.add(long)
    h.run()
    assert h.executor.failures, "the fixture"
    taken = [block for plan in h.executor.plans for work in plan.work for block in work.new_block_ids]
    assert len(taken) == len(set(taken)) == 16
    assert_as_expected(h, long)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ends", ["abort", "roll back", "preempt"])
def test_who_ends_in_the_middle_of_its_prompt_gives_back_the_rest(mode, ends):
    h = harness(**mode, num_blocks=30, max_num_batched_tokens=8)
    long, other = request("l", 80, 2), request("o", 5, 30)
    h.add(other, long)
    step_until(h, 3)
    stats, scheduler = h.engine.stats(), h.engine.scheduler
    assert stats.reserved_blocks > 10 and stats.running == 2
    (seq,) = h.engine.requests.get("l").sequences
    if ends == "abort":
        h.engine.abort(Abort(request_id="l", attempt=0))
    elif ends == "roll back":
        scheduler.roll_back(seq)
    else:
        scheduler.rows.preempt(seq)
    assert h.engine.stats().reserved_blocks == 0 and seq.table.num_reserved == 0
    check_invariants(h.engine)
    h.run()
    assert_as_expected(h, other, *([] if ends == "abort" else [long]))


def test_a_choice_that_has_spoken_reserves_what_it_does_not_share():
    """A resumed choice: its prompt is another choice's, its answer of 30 tokens is computed in chunks."""
    answer = [2 + i % 60 for i in range(30)]
    h = harness(num_blocks=40, max_num_batched_tokens=8)
    req = request("r", 10, 40, n=2, resume=[answer, answer[::-1]])
    h.add(req)
    h.run()
    assert_as_expected(h, req)
    shares = [plan for plan in h.executor.plans if plan.block_copies]
    assert len(shares) == 1, "the fixture: the second choice shares the prompt"
    chunks = [work for plan in h.executor.plans[shares[0].step_id - 1 :] for work in plan.work if work.row == 1]
    assert all(len(work.new_block_ids) <= 3 for work in chunks[1:4]) and any(work.new_block_ids for work in chunks[1:4])


@pytest.mark.parametrize("mode", MODES)
def test_waste_is_what_the_last_blocks_of_those_who_run_leave_empty(mode):
    h = harness(**mode, num_blocks=60, max_num_batched_tokens=8)
    h.add(request("l", 81, 2), request("o", 5, 30))
    most = 0
    while h.engine.has_work():
        h.step()
        stats = h.engine.stats()
        assert 0 <= stats.empty_slots <= min(3 * stats.running, stats.allocated_slots)
        most = max(most, stats.allocated_slots)
    assert most >= 84 and (stats.empty_slots, stats.allocated_slots) == (0, 0)


# ---- histories ----

TestPrompts = PromptMachine.TestCase
TestPrompts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- seeded defects ----


class Leaks(BlockManager):
    """What is left of a reservation is kept when its sequence has gone."""

    def release(self, table: BlockTable, step_id: int) -> None:
        table.num_reserved = 0
        super().release(table, step_id)


class GivesBackTwice(BlockManager):
    def release(self, table: BlockTable, step_id: int) -> None:
        self.pool.unreserve(table.num_reserved)
        super().release(table, step_id)


class TakesMore(BlockManager):
    """A chunk takes one block beyond its reservation, if there is one."""

    def take_reserved(self, table: BlockTable, num_tokens: int) -> list[int]:
        added = super().take_reserved(table, num_tokens)
        more = (self.pool.allocate(1) or []) if added else []
        self._append(table, more)
        return added + more


class TakesFromAll(BlockManager):
    """A chunk takes blocks that anybody could have, and leaves its reservation as it was."""

    def take_reserved(self, table: BlockTable, num_tokens: int) -> list[int]:
        kept, table.num_reserved = table.num_reserved, 0
        added = self.extend(table, num_tokens)
        table.num_reserved = kept
        assert added is not None, "reserved blocks are always there"
        return added


class ReservesNothing(BlockManager):
    """Admission looks for room and forgets it."""

    def reserve(self, table: BlockTable, num_tokens: int) -> bool:
        return True

    def take_reserved(self, table: BlockTable, num_tokens: int) -> list[int]:
        added = self.extend(table, num_tokens)
        assert added is not None, "reserved blocks are always there"
        return added


class OpenPool(BlockPool):
    @property
    def num_allocatable(self) -> int:
        return super().num_allocatable + self.num_reserved


class ReservedForNobody(BlockManager):
    """Others are given reserved blocks."""

    def __init__(self, num_blocks: int, block_size: int, **names: str) -> None:
        super().__init__(num_blocks, block_size, **names)
        self.pool = OpenPool(num_blocks)


NOT_ITS_OWN = "what it lacks is not what is reserved for it|not the blocks of its tokens"


@pytest.mark.parametrize(
    ("defect", "because"),
    [
        (Leaks, LOST),
        (GivesBackTwice, LOST),
        (TakesMore, NOT_ITS_OWN),
        (TakesFromAll, NOT_ITS_OWN),
        (ReservesNothing, NOT_ITS_OWN),
        (ReservedForNobody, "more blocks are reserved than are idle|idle blocks less the reserved ones"),
    ],
)
def test_a_defect_of_the_manager_is_caught(defect: type[BlockManager], because: str) -> None:
    assert_caught(block_machine.machine(defect), because)


# chaos: they are found after thousands of histories
@pytest.mark.parametrize(
    "event", ["preempt", *(pytest.param(event, marks=pytest.mark.chaos) for event in ("finish", "roll_back"))]
)
def test_a_reservation_leaked_when_a_prompt_loses_its_row_is_caught(event, monkeypatch):
    """On preemption, at an end or an abort, after a failed load."""
    owner: Any = RunningRows if event == "preempt" else Scheduler
    whole = getattr(owner, event)

    def leaks(self: Any, seq: Sequence) -> None:
        seq.table.num_reserved = 0
        whole(self, seq)

    monkeypatch.setattr(owner, event, leaks)
    assert_caught(PromptMachine, LOST)


@pytest.mark.parametrize("defect", [TakesMore, TakesFromAll])
def test_a_chunk_that_takes_blocks_beyond_its_reservation_is_caught(defect, monkeypatch):
    monkeypatch.setattr("tandem.workers.engine.build_engine.BlockManager", defect)
    because = "a prompt that needs [0-9]+ blocks holds and reserves [0-9]+|reserved blocks are always there"
    assert_caught(PromptMachine, because)


@pytest.mark.chaos
def test_a_promise_leaked_on_abort_is_caught():
    class Forgets(KVOffload):
        def drop(self, seq: Sequence) -> None:
            seq.table.num_promised = 0

    machine = tier_machine.machine(offload_class=Forgets)
    assert_caught(machine, "promised blocks are not the sum of the tables' promises|blocks are kept for nobody")
