"""The scheduler without an engine: what each plan holds, who is let in, who gives way, what is told to the queue."""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import pytest
from builders import filled, request

from tandem.configs.schema import SchedulerSettings
from tandem.workers.engine.base.blockers import Awaited, Blocker
from tandem.workers.engine.base.draft_record import DraftRecord
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.sequence import RequestState, Sequence, SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockManager, BlockTable
from tandem.workers.engine.drafting.drafting import Drafting
from tandem.workers.engine.observers.chunk_limiter import ChunkLimiter
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.step_turns import StepTurns
from tandem.workers.engine.transfers.lower_tiers import LowerTiers, OverlappedLoad
from tandem.workers.engine.waiting.admission_rule import AdmissionRule
from tandem.workers.engine.waiting.batching_policy import NEXT_BATCH
from tandem.workers.engine.waiting.fairness import FairQueue, TokenCosts
from tandem.workers.engine.waiting.probation import Probation
from tandem.workers.engine.waiting.waiting_queue import WaitingQueue
from tandem.workers.messages.step import StepPlan
from tandem.workers.messages.transfer import Failure

SIZE = 4


class Tiers(LowerTiers):
    """Writes down what it is asked; `loads`: sequences for which something is brought up."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.reserves: list[int] = []
        self.loads: list[Sequence] = []

    def load(self, seq: Sequence, reserve: int) -> int | None:
        self.asked.append(("load", seq))
        self.reserves.append(reserve)
        return 3 if seq in self.loads else None

    def forbid_loads(self, seq: Sequence) -> None:
        self.asked.append(("forbid_loads", seq))

    def load_overlapped(self, seq: Sequence) -> OverlappedLoad | None:
        self.asked.append(("join", seq))
        return None

    def drop(self, seq: Sequence) -> None:
        self.asked.append(("drop", seq))

    def store(self, table: BlockTable) -> None:
        self.asked.append(("store", len(table.block_ids)))

    def swap_out(self, table: BlockTable) -> None:
        self.asked.append(("swap_out", len(table.block_ids)))

    def forget(self, table: BlockTable) -> None:
        self.asked.append(("forget", len(table.block_ids)))

    def of(self, kind: str) -> list[Any]:
        return [what for asked, what in self.asked if asked == kind]


class AlwaysDrafts(Drafting):
    """Drafts as many tokens as it may, whatever they cost."""

    def begin_step(self, num_rows: int) -> bool:
        return True

    def budget(self, record: DraftRecord, num_tokens: int) -> int:
        return self.most


class Bench:
    """A scheduler, its manager and queue; results come when back() is called."""

    @property
    def num_running(self) -> int:
        return sum(seq.status is SequenceStatus.RUNNING for seq in self.scheduler.rows.sequences)

    def __init__(
        self,
        num_blocks: int = 64,
        rows: int = 8,
        budget: int = 32,
        *,
        depth: int = 1,
        relay: bool = False,
        pace: int | None = None,
        tiers: Tiers | None = None,
        rules: Iterable[AdmissionRule] = (),
        drafting: Drafting | None = None,
    ) -> None:
        settings = SchedulerSettings(
            max_num_seqs=rows, max_num_batched_tokens=budget, max_itl_ms=None if pace is None else 10.0
        )
        self.manager = BlockManager(num_blocks, SIZE, model_revision="m", kv_dtype="d")
        self.queue = WaitingQueue(FairQueue(TokenCosts(prompt=1.0, output=10.0)))
        probation = Probation(self.queue, 0 if drafting is None else drafting.most)
        self.scheduler = Scheduler(
            settings,
            self.manager,
            self.queue,
            ChunkLimiter(pace or 10**6),
            [probation, *rules],
            probation,
            StepTurns(probation, None),
            relay=relay,
            depth=depth,
            tiers=tiers,
            drafting=drafting,
        )
        self.flights: list[InFlightStep] = []
        self._arrivals: Iterator[int] = count()

    def make(
        self,
        prompt: int,
        most: int = 50,
        *,
        n: int = 1,
        tenant: str = "t",
        priority: int = 0,
        suspect: bool = False,
    ) -> list[Sequence]:
        arrival = next(self._arrivals)
        tokens = [100 * arrival + i for i in range(prompt)]
        asked = request(f"r{arrival}", tokens, most, n=n, tenant=tenant, suspect=suspect)
        state = RequestState(asked, 0.0, num_live=n)
        for choice in range(n):
            table, order = self.manager.new_table(None, ""), (priority, arrival, choice)
            state.sequences.append(
                Sequence(
                    state,
                    choice,
                    list(tokens),
                    prompt,
                    prompt + most,
                    prompt,
                    frozenset(),
                    order,
                    table,
                    num_known=prompt,
                    num_charged=prompt,
                )
            )
        return state.sequences

    def add(self, prompt: int, most: int = 50, **more: Any) -> Sequence:
        (seq,) = self.make(prompt, most, **more)
        self.scheduler.admission.enqueue(seq)
        return seq

    def plan(self) -> StepPlan | None:
        planned = self.scheduler.schedule()
        if planned is None:
            return None
        self.flights.append(planned[0])
        return planned[1]

    def planned(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None
        return plan

    def withdraw(self, seq: Sequence) -> None:
        """Its adapter has left the device."""
        self.queue.block(seq, Blocker.ADAPTER, seq.adapter)
        self.scheduler.admission.withdraw(seq)

    def back(self) -> None:
        """The oldest result: a token for each row that sampled."""
        in_flight = self.flights.pop(0)
        self.scheduler.returned(in_flight.step_id)
        for seq, work in zip(in_flight.sequences, in_flight.work, strict=True):
            if in_flight.step_id <= seq.void_until or seq.status is SequenceStatus.FINISHED:
                continue
            if seq.status is SequenceStatus.RUNNING:
                seq.num_computed += work.num_tokens
            if work.samples:
                seq.tokens.append(7)
            if seq.status is SequenceStatus.RUNNING:
                self.manager.commit(seq.table, seq.tokens, seq.num_computed)

    def step(self) -> dict[Sequence, int]:
        """One plan and its result: tokens by sequence."""
        if self.plan() is None:
            return {}
        in_flight = self.flights[-1]
        tokens = {seq: work.num_tokens for seq, work in zip(in_flight.sequences, in_flight.work, strict=True)}
        self.back()
        self.check()
        return tokens

    def check(self) -> None:
        self.queue.check_invariants()
        self.scheduler.check_invariants()


# ---- what a step holds ----


def test_streams_take_their_token_of_the_step_and_prompts_the_rest_in_their_order():
    d = Bench(budget=10)
    stream = d.add(2)
    d.step()
    first, second, third = d.add(6), d.add(20), d.add(5)
    assert d.step() == {stream: 1, first: 6, second: 3}
    assert d.step() == {stream: 1, first: 1, second: 8}
    assert d.step() == {stream: 1, first: 1, second: 8}
    assert d.step() == {stream: 1, first: 1, second: 1, third: 5}


def test_a_prompt_that_is_cut_is_behind_the_streams_that_came_after_it_too():
    d = Bench(budget=10)
    slow = d.add(25, priority=-1)
    stream = d.add(1, priority=5)
    assert d.step() == {slow: 10} and d.step() == {slow: 10}
    assert d.step() == {slow: 5, stream: 1}
    late = d.add(30, priority=-2)
    assert d.step() == {slow: 1, stream: 1, late: 8}
    assert d.step() == {slow: 1, stream: 1, late: 8}


@pytest.mark.parametrize(("pace", "chunk"), [(None, 9), (3, 3)])
def test_a_pace_holds_for_prompts_beside_streams_whether_they_run_or_wait(pace, chunk):
    d = Bench(budget=10, pace=pace)
    stream = d.add(2)
    assert d.step() == {stream: 2}, "no stream, no pace"
    long = d.add(30)
    assert d.step() == {stream: 1, long: chunk}
    assert d.step() == {stream: 1, long: chunk}
    d.scheduler.finish(stream)
    assert d.step() == {long: min(10, 30 - 2 * chunk)}


def test_steps_are_numbered_and_an_empty_one_is_none():
    d = Bench()
    assert d.plan() is None
    d.add(3)
    assert d.planned().step_id == 1
    assert d.plan() is not None and d.plan() is not None
    assert [in_flight.step_id for in_flight in d.flights] == [1, 2, 3], "tokens to come are planned for"


def test_a_sequence_that_will_be_full_is_planned_no_more_and_others_are():
    d = Bench(depth=2)
    full, other = d.add(3, 2), d.add(3, 5)
    d.planned()
    d.planned()
    assert {work.row for work in d.planned().work} == {other.row} and full.num_known == 5
    for _ in range(3):
        d.back()
    assert (len(full.tokens), len(other.tokens)) == (5, 6)


def test_counts_of_a_step_are_of_streams_and_of_prompt_tokens():
    d = Bench(budget=10)
    d.add(2)
    d.step()
    d.add(30)
    d.planned()
    (in_flight,) = d.flights
    assert (in_flight.num_decode, in_flight.num_prefill_tokens, len(in_flight.admitted)) == (1, 9, 1)
    assert [work.samples for work in in_flight.work] == [True, False]


def test_streams_of_a_pipeline_spread_evenly_and_wait_for_their_tokens():
    d = Bench(relay=True, depth=2)
    seqs = [d.add(2) for _ in range(5)]
    d.step()
    first, second = d.planned(), d.planned()
    assert len(first.work) == 3 and len(second.work) == 2, "half of five, rounded up"
    assert not {work.row for work in first.work} & {work.row for work in second.work}
    assert all(work.token_ids == [7] for plan in (first, second) for work in plan.work), "ranks lack what was sampled"
    assert d.plan() is None
    d.back()
    assert {work.row for work in d.planned().work} == {work.row for work in first.work}
    assert len(seqs) == d.num_running


# ---- rows ----


def test_beside_a_suspect_no_second_step_of_a_pipeline_is_planned_for_so_all_streams_are_in_the_one():
    d = Bench(depth=2, relay=True)
    others = [d.add(3) for _ in range(4)]
    d.step()
    suspect = d.add(3, suspect=True)
    assert d.step() == {suspect: 3}
    assert d.step() == dict.fromkeys(others, 1)
    assert d.plan() is not None and d.plan() is None, "of the suspect; nothing beside it"


def test_rows_are_freed_once_and_not_when_they_are_bound_again():
    d = Bench(rows=2)
    one, two = d.add(2), d.add(2)
    plan = d.planned()
    assert [init.row for init in plan.new_rows] == [0, 1] and plan.freed_rows == []
    assert [(init.token_ids, init.prompt_len, init.num_computed) for init in plan.new_rows] == [
        (one.tokens, 2, 0),
        (two.tokens, 2, 0),
    ]
    d.back()
    d.scheduler.finish(one)
    assert one.row == -1 and one.status is SequenceStatus.FINISHED and d.num_running == 1
    assert d.planned().freed_rows == [0] and d.planned().freed_rows == []
    d.back()
    d.scheduler.finish(two)
    three = d.add(2)
    plan = d.planned()
    assert (plan.freed_rows, plan.new_rows[0].row, three.row) == ([], 1, 1)


def test_a_finished_one_is_gone_from_every_later_plan():
    d = Bench()
    one, two = d.add(2), d.add(2)
    d.step()
    d.scheduler.finish(one)
    assert d.step() == {two: 1} and d.step() == {two: 1}
    d.scheduler.finish(two)
    assert d.plan() is None and d.manager.pool.num_used == 0


def test_who_comes_in_takes_its_place_among_those_who_run():
    d = Bench(budget=64)
    order = [d.add(2, priority=priority) for priority in (3, 1)]
    d.step()
    order += [d.add(2, priority=priority) for priority in (2, 0, 4)]
    d.step()
    assert d.scheduler.rows.sequences == sorted(order, key=lambda seq: seq.order)


# ---- letting in ----


@pytest.mark.parametrize(("blocks", "drafts"), [(2, 0), (3, 3)])
def test_drafts_leave_the_blocks_that_those_who_run_will_need(blocks, drafts):
    """The drafts need a second block. One is left for the stream itself."""
    d = Bench(num_blocks=blocks, drafting=AlwaysDrafts(3))
    d.add(3)
    d.step()
    assert [work.max_drafts for work in d.planned().work] == [drafts]


def test_who_may_have_its_last_token_in_a_plan_in_flight_holds_up_nobody():
    d = Bench(depth=2, drafting=AlwaysDrafts(3))
    short, long = d.add(3, most=3), d.add(3)
    d.step()
    assert [work.max_drafts for work in d.planned().work] == [1, 3], "short lacks two tokens"
    assert [work.row for work in d.planned().work] == [long.row] and short.status is SequenceStatus.RUNNING


def test_stages_get_what_was_guessed_at_the_end_of_the_step_before():
    """None comes behind the last token, and steps are without drafts for a while after one that failed."""
    d = Bench(depth=2, relay=True, drafting=AlwaysDrafts(3))
    seq = d.add(3, most=7)
    d.step()
    (first,) = d.planned().work
    assert (first.token_ids, first.draft_ids, first.num_guesses) == ([7], [], 3)
    d.back()
    seq.guesses = [8, 9, 6]
    (work,) = d.planned().work
    assert (work.draft_ids, work.max_drafts, work.num_guesses) == ([8, 9, 6], 3, 0), "five tokens are left"
    d.scheduler.take_back(d.flights.pop())
    plan = d.planned()
    assert plan.rolled_back == [(seq.row, 5, 4)]
    assert (plan.work[0].token_ids, plan.work[0].draft_ids) == ([], []), "the stages know the token by now"


def test_a_guess_behind_the_last_token_is_left_out():
    d = Bench(relay=True, drafting=AlwaysDrafts(3))
    seq = d.add(3, most=3)
    d.step()
    seq.guesses = [8, 9, 6]
    (work,) = d.planned().work
    assert (work.draft_ids, work.num_guesses) == ([8], 0)


def test_who_waits_for_the_next_batch_holds_up_nobody_of_this_one():
    """As those of it that were preempted, behind one that has come since with a higher priority."""

    class NotOfIt(AdmissionRule):
        def before_row(self, seq: Sequence) -> Awaited | None:
            return NEXT_BATCH if seq is late else None

    d = Bench(rules=[NotOfIt()])
    late, back = d.add(3, priority=-1), d.add(3)
    assert d.step() == {back: 3}
    assert d.queue.blocker_of(late) is Blocker.BATCH


def test_a_suspect_that_comes_with_others_has_the_first_step():
    d = Bench()
    other, suspect = d.add(3), d.add(3, suspect=True)
    assert d.step() == {suspect: 3} and d.step() == {other: 3}


@pytest.mark.parametrize(("running", "reserve"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_newcomer_leaves_a_block_for_every_four_who_run(running, reserve):
    for spare in (reserve - 1, reserve):
        d = Bench(num_blocks=running + 3 + spare, rows=16)
        for _ in range(running):
            d.add(1)
        d.step()
        newcomer = d.add(11)
        assert (newcomer in d.step()) == (spare >= reserve)


def test_what_fits_an_empty_pool_comes_in_alone():
    d = Bench(num_blocks=3)
    assert d.add(12, 1) in d.step()


def test_nobody_is_let_in_by_a_step_that_takes_blocks_away():
    d = Bench(num_blocks=5, rows=4)
    early, late = d.add(7), d.add(7)
    d.step()
    small = d.add(1)
    seen = []
    while not d.scheduler.num_preemptions:
        seen.append(d.step())
    assert late.status is SequenceStatus.WAITING and small not in seen[-1] and early in seen[-1]
    assert late.num_scheduled == late.num_computed == 0 and not late.table.block_ids


def test_what_is_charged_is_what_was_computed_and_said():
    d = Bench(budget=8)
    seq = d.add(10)
    d.step()
    assert d.queue.tenants.counter(seq) == 10
    d.step()
    d.step()
    d.scheduler.charge_running()
    d.scheduler.charge_running()
    assert d.queue.tenants.counter(seq) == 10 + 2 * 10
    d.step()
    d.scheduler.finish(seq)
    assert d.queue.tenants.counter(seq) == 10 + 3 * 10 and d.queue.tenants.drain_charges() == {"t": 40.0}


def test_what_is_found_is_not_charged():
    d = Bench(budget=64)
    first = d.add(9)
    d.step()
    d.scheduler.finish(first)
    (again,) = d.make(9, tenant="other")
    again.tokens[:] = first.tokens[:9]
    d.queue.tenants.drain_charges()
    d.scheduler.admission.enqueue(again)
    d.planned()
    assert d.flights[-1].admitted == [(again, 8)] and again.num_computed == again.num_scheduled - 1 == 8
    assert d.queue.tenants.drain_charges() == {"other": 1.0}


def test_a_token_that_came_after_its_sequence_gave_way_is_charged():
    d = Bench()
    seq = d.add(3)
    d.planned()
    d.scheduler.rows.preempt(seq)
    d.back()
    assert len(seq.tokens) == 4 and d.queue.tenants.counter(seq) == 3
    d.scheduler.finish(seq)
    assert d.queue.tenants.counter(seq) == 3 + 10 and len(d.queue) == 0


def test_between_tenants_the_order_is_of_what_those_who_run_have_had_by_now():
    d = Bench(rows=2)
    running = d.add(2, tenant="loud")
    for _ in range(3):
        d.step()
    same, other = d.add(2, tenant="loud"), d.add(2, tenant="quiet")
    d.queue.tenants.charge(other, prompt_tokens=15)
    assert d.queue.tenants.counter(same) == 2, "its output is not charged yet"
    assert d.step() == {running: 1, other: 2} and same.status is SequenceStatus.WAITING


class InVain(AdmissionRule):
    """Every adapter is on the device, and none of them has its turn; writes down who waits no longer."""

    def __init__(self) -> None:
        self.gone: list[Sequence] = []

    def before_row(self, seq: Sequence) -> Awaited | None:
        return None if seq.adapter is None else Awaited(Blocker.TURN, seq.adapter)

    def left(self, seq: Sequence) -> None:
        self.gone.append(seq)


def test_who_waits_for_the_turn_of_its_adapter_holds_up_nobody_and_may_be_taken_back():
    d = Bench(rules=[InVain()])
    (waiting,) = d.make(3)
    waiting.adapter = "x"
    d.scheduler.admission.enqueue(waiting)
    behind = d.add(3)
    assert d.step() == {behind: 3} and list(d.queue.blocked_by(Blocker.TURN, "x")) == [waiting]
    d.withdraw(waiting)
    assert d.queue.blocker_of(waiting) is Blocker.ADAPTER and not d.queue.keys_of(Blocker.TURN)


def test_rules_hear_of_who_ends_while_it_waits_but_for_forks_and_of_who_waits_for_its_adapter_again():
    rule = InVain()
    d = Bench(rules=[rule])
    again, ending, fork = (seq for _ in range(3) for seq in d.make(3))
    for seq in (again, ending, fork):
        seq.adapter = "x"
    d.scheduler.admission.enqueue(again)
    d.scheduler.admission.enqueue(ending)
    d.queue.block(fork, Blocker.FORK, "r")
    base = d.add(3)
    d.step()
    d.withdraw(again)
    for seq in (ending, fork, base):
        d.scheduler.finish(seq)
    assert rule.gone == [again, ending]


@pytest.mark.parametrize("failure", [None, Failure("disk", "gone")])
def test_who_waited_for_kv_that_could_not_be_loaded_computes_it(failure):
    tiers = Tiers()
    d = Bench(tiers=tiers)
    d.add(2)
    (seq,) = d.make(9)
    tiers.loads.append(seq)
    d.scheduler.admission.enqueue(seq)
    assert d.queue.blocker_of(seq) is Blocker.KV
    tiers.loads.clear()
    d.scheduler.admission.unblock(Awaited(Blocker.KV, 3, failure))
    assert d.queue.blocker_of(seq) is None and tiers.of("forbid_loads") == ([seq] if failure else [])
    d.queue.block(seq, Blocker.ADAPTER, "x")
    d.scheduler.admission.unblock(Awaited(Blocker.ADAPTER, "x", failure))
    assert len(tiers.of("forbid_loads")) == bool(failure), "what else fails does not speak of KV"


# ---- giving way ----


def test_of_two_tenants_the_one_that_has_had_more_gives_way():
    """Nobody waits, so nothing has been charged before: it is charged when blocks run out."""
    d = Bench(num_blocks=6)
    (hungry,) = d.make(3, tenant="hungry")
    d.scheduler.admission.enqueue(hungry)
    for _ in range(8):
        d.step()
    modest = d.add(3, tenant="modest", priority=9)
    while not d.scheduler.num_preemptions:
        d.step()
    assert (hungry.status, modest.status) == (SequenceStatus.WAITING, SequenceStatus.RUNNING)


@pytest.mark.parametrize("ends_with", [1, 2])
def test_who_lacks_a_block_that_a_plan_in_flight_still_names_sits_out(ends_with):
    """One block is lacking, and one or two will be free when the plan has returned."""
    d = Bench(num_blocks=2 + ends_with, depth=2)
    growing, ending, other = d.add(3), d.add(4 * ends_with - 1), d.add(1)
    d.planned()
    d.back()
    assert growing.status is ending.status is SequenceStatus.RUNNING
    if other.status is SequenceStatus.WAITING:
        d.scheduler.finish(other)
    while d.manager.pool.num_allocatable:
        assert d.manager.pool.allocate(1)
    d.planned()
    d.scheduler.finish(ending)
    assert (d.manager.pool.num_allocatable, d.manager.pool.num_pending) == (0, len(ending.table.block_ids) or ends_with)
    plan = d.plan()
    assert plan is None or growing.row not in {work.row for work in plan.work}
    assert d.scheduler.num_preemptions == 0 and growing.status is SequenceStatus.RUNNING
    while d.flights:
        d.back()
    assert growing.row in {work.row for work in d.planned().work}


def test_those_behind_one_that_sits_out_are_served():
    d = Bench(num_blocks=4, depth=2)
    growing, behind, ending = d.add(3), d.add(1), d.add(2)
    d.step()
    assert d.manager.pool.allocate(1), "the last block is somebody else's"
    d.planned()
    d.scheduler.finish(ending)
    assert [work.row for work in d.planned().work] == [behind.row]
    assert growing.status is SequenceStatus.RUNNING and d.scheduler.num_preemptions == 0


def test_all_choices_of_a_request_give_way_together_where_they_are_kept_below():
    for tiers, gone in ((Tiers(), 2), (None, 1)):
        d = Bench(num_blocks=5, tiers=tiers)
        first = d.add(6, tenant="a")
        d.step()
        pair = d.make(1, n=2, tenant="b")
        for seq in pair:
            d.scheduler.admission.enqueue(seq)
        d.queue.tenants.charge(pair[0], prompt_tokens=10_000)
        d.step()
        assert d.num_running == 3 and d.manager.pool.allocate(1), "the last block is somebody else's"
        d.step()
        d.step()
        assert d.scheduler.num_preemptions == gone and first.status is SequenceStatus.RUNNING
        assert [seq.status for seq in pair].count(SequenceStatus.WAITING) == gone
        if tiers is not None:
            assert tiers.of("swap_out") == [1, 1]


def test_who_rests_on_kv_that_did_not_come_is_rolled_back_and_its_next_plans_count():
    d = Bench(depth=2)
    seq, other = d.add(5), d.add(5)
    d.planned()
    d.planned()
    d.scheduler.roll_back(seq)
    assert (seq.status, seq.void_until, seq.row) == (SequenceStatus.WAITING, 2, -1)
    assert (seq.num_known, seq.num_scheduled, seq.num_computed, seq.table.block_ids) == (5, 0, 0, [])
    assert d.num_running == 1 and len(d.queue) == 1
    d.back()
    d.back()
    assert len(seq.tokens) == 5 and len(other.tokens) == 7
    assert d.step() == {other: 1, seq: 5} and len(seq.tokens) == 6


def test_who_waits_or_has_ended_is_rolled_back_without_a_row():
    d = Bench()
    waiting, ended = d.add(5), d.add(5)
    d.scheduler.finish(ended)
    waiting.num_known = 9
    d.scheduler.roll_back(waiting)
    d.scheduler.roll_back(ended)
    assert (waiting.num_known, waiting.status, ended.void_until) == (5, SequenceStatus.WAITING, 0)


# ---- tiers below ----


def test_a_plan_that_is_taken_back_changes_none_that_has_ended_or_was_rolled_back():
    d = Bench()
    ended, lost, stream = d.add(6), d.add(6), d.add(6)
    d.step()
    d.plan()
    d.scheduler.finish(ended)
    d.scheduler.roll_back(lost)
    counts = ended.num_known, ended.num_scheduled
    d.scheduler.take_back(d.flights.pop())
    assert (ended.num_known, ended.num_scheduled) == counts
    assert (lost.num_known, lost.num_scheduled) == (len(lost.tokens), 0)
    assert (stream.num_known, stream.num_scheduled) == (len(stream.tokens), len(stream.tokens) - 1)
    d.check()
    assert d.step() == {stream: 1}, "the failed step had three tokens, the next one may have one"


def test_ends_are_told_to_the_tiers_with_what_they_held():
    tiers = Tiers()
    d = Bench(tiers=tiers)
    running, waiting = d.add(9), d.add(3)
    d.step()
    late = d.add(3)
    d.scheduler.finish(running)
    assert tiers.of("store") == [3]
    d.scheduler.finish(late)
    assert tiers.of("drop") == [late] and len(d.queue) == 0
    d.scheduler.forget(waiting)
    assert tiers.of("forget") == [1]
    assert d.step() == {waiting: 1}


def test_a_forgotten_prefix_is_found_no_more():
    d = Bench(budget=64)
    first = d.add(9)
    d.step()
    d.scheduler.forget(first)
    d.scheduler.finish(first)
    (again,) = d.make(9)
    again.tokens[:] = first.tokens[:9]
    assert d.manager.match_prefix(again.table, again.tokens) == []


def test_a_newcomer_behind_others_asks_at_once_for_what_lies_below():
    tiers = Tiers()
    d = Bench(tiers=tiers)
    alone = d.add(3)
    assert tiers.of("load") == [], "alone it waits for nothing"
    behind, found = d.add(3), d.make(3)[0]
    assert tiers.of("load") == [behind]
    tiers.loads.append(found)
    d.scheduler.admission.enqueue(found)
    assert d.queue.blocker_of(found) is Blocker.KV and len(d.queue) == 2
    assert d.step() == {alone: 3, behind: 3}
    tiers.loads.clear()
    d.scheduler.admission.unblock(Awaited(Blocker.KV, 3))
    assert d.step() == {alone: 1, behind: 1, found: 3}


@pytest.mark.parametrize(("ahead", "asks"), [(5, True), (6, False)])
def test_it_asks_when_the_next_step_could_begin_with_it(ahead, asks):
    """Eight tokens a step, two of them for what runs: five of those that wait leave one."""
    tiers = Tiers()
    d = Bench(budget=8, tiers=tiers)
    d.add(3)
    d.add(4)
    d.step()
    assert d.num_running == 2
    d.add(ahead)
    before = len(tiers.of("load"))
    d.add(3)
    assert len(tiers.of("load")) - before == int(asks)


def test_who_has_run_before_does_not_wait_for_those_in_the_queue():
    tiers = Tiers()
    d = Bench(budget=8, tiers=tiers)
    back = d.add(3)
    d.step()
    d.add(30)
    before = len(tiers.of("load"))
    d.scheduler.admission.enqueue(*d.make(3))
    assert len(tiers.of("load")) == before
    back.bound_step = 1
    d.scheduler.admission.enqueue(back)
    assert tiers.of("load")[before:] == [back]


def test_at_its_turn_one_that_is_alone_joins_and_others_load():
    tiers = Tiers()
    d = Bench(tiers=tiers)
    first, loading, third = d.add(3), d.make(3)[0], d.make(3)[0]
    tiers.loads.append(loading)
    d.scheduler.admission.enqueue(loading)
    d.scheduler.admission.enqueue(third)
    assert d.step() == {first: 3, third: 3}, "who waits for a load holds up nobody"
    assert tiers.of("join") == [first] and tiers.of("load") == [loading, third, first, third]
    assert tiers.reserves == [0, 0, 0, 1] and d.queue.blocker_of(loading) is Blocker.KV
    loading.adapter = "x"
    d.withdraw(loading)
    assert d.queue.blocker_of(loading) is Blocker.ADAPTER and tiers.of("drop") == [loading]


def test_a_joined_load_is_awaited_and_its_blocks_lead():
    tiers = Tiers()
    d = Bench(tiers=tiers)
    (seq,) = d.make(9)
    coming = d.manager.pool.allocate(2) or []
    keys = list(d.manager.prefix_keys(seq.table, seq.tokens))
    for block_id, key in zip(coming, keys, strict=True):
        d.manager.pool.publish(block_id, key)
    tiers.load_overlapped = lambda _: OverlappedLoad(5, coming)  # type: ignore[method-assign]
    d.scheduler.admission.enqueue(seq)
    plan = d.planned()
    assert plan.awaits == [5] and plan.work[0].num_tokens == 1 and plan.work[0].new_block_ids[:2] == coming
    assert plan.new_rows[0].num_computed == 8 and tiers.of("load") == []


# ---- suspects ----


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_suspect_that_loads_kv_leaves_its_turn_to_the_next_and_gets_it_again(is_queued):
    tiers = Tiers()
    d = Bench(tiers=tiers)
    other = d.add(3)
    d.step()
    (slow,) = d.make(3, suspect=True)
    tiers.loads.append(slow)
    if is_queued:  # nothing was found when it came, and then something at its turn
        tiers.loads.clear()
        d.scheduler.admission.enqueue(slow)
        assert d.scheduler.alone is slow.state
        tiers.loads.append(slow)
    else:
        d.scheduler.admission.enqueue(slow)
    fast = d.add(3, suspect=True)
    if is_queued:
        assert d.queue.blocker_of(fast) is Blocker.ALONE
        assert d.step() == {other: 1}
    assert d.queue.blocker_of(slow) is Blocker.KV
    assert d.step() == {fast: 3} and d.scheduler.alone is fast.state
    tiers.loads.clear()
    d.scheduler.admission.unblock(Awaited(Blocker.KV, 3))
    assert d.queue.blocker_of(slow) is Blocker.ALONE and tiers.of("drop")[-1] is slow
    steps = [d.step() for _ in range(8)]
    assert steps[:6] == [{other: 1}, {fast: 1}] * 3
    assert steps[6:] == [{slow: 3}, {other: 1, fast: 1}] and d.scheduler.alone is slow.state


def test_a_suspect_that_waits_for_its_adapter_again_or_was_preempted_leaves_its_turn():
    tiers = Tiers()
    d = Bench(rows=1, tiers=tiers)
    other = d.add(3)
    d.step()
    slow, fast = d.add(3, suspect=True), d.add(3, suspect=True)
    assert d.scheduler.alone is slow.state
    slow.adapter = "x"
    d.withdraw(slow)
    assert d.step() == {other: 1} and d.scheduler.alone is fast.state
    d.scheduler.finish(other)
    assert d.step() == {fast: 3}
    third = d.add(3, suspect=True)
    assert d.queue.blocker_of(third) is Blocker.ALONE
    d.scheduler.roll_back(fast)
    d.scheduler.schedule()
    assert d.scheduler.alone is fast.state, "it needs only a row"
    d.check()


# ---- choices ----


def test_a_choice_shares_the_prompt_of_one_that_has_computed_it():
    d = Bench()
    first, second = d.make(6, n=2)
    d.scheduler.admission.enqueue(first)
    d.step()
    d.scheduler.admission.enqueue(second)
    plan = d.planned()
    assert second.num_scheduled == 6 and second.table.block_ids[0] == first.table.block_ids[0]
    assert plan.block_copies == [(first.table.block_ids[1], second.table.block_ids[1])]
    assert d.flights[-1].admitted == [(second, 5)], "the last token of the prompt is computed again"


@pytest.mark.parametrize(("spare", "computed"), [(1, None), (2, 9)])
def test_a_choice_needs_room_for_what_it_does_not_share(spare, computed):
    """One block of its own, and one left for those who run. It takes over the last, half full block as well."""
    d = Bench(num_blocks=3 + spare)
    first, second = d.make(10, n=2)
    d.scheduler.admission.enqueue(first)
    d.step()
    d.scheduler.admission.enqueue(second)
    d.planned()
    assert d.flights[-1].admitted == ([] if computed is None else [(second, computed)])


def test_a_choice_that_has_said_something_shares_the_prompt_if_no_more_of_it_is_found():
    d = Bench()
    first, second = d.make(6, n=2)
    d.scheduler.admission.enqueue(first)
    d.step()
    second.tokens += [1, 2, 3]
    d.scheduler.admission.enqueue(second)
    plan = d.planned()
    assert d.flights[-1].admitted == [(second, 6)] and len(plan.block_copies) == 1


def test_a_choice_whose_answer_is_found_too_takes_that():
    d = Bench()
    first, second = d.make(6, n=2)
    second.tokens += [1, 2, 3]
    table = d.manager.new_table(None, "")
    assert filled(d.manager, table, 8)
    d.manager.commit(table, second.tokens, 8)
    d.manager.release(table, 0)
    d.scheduler.admission.enqueue(first)
    d.step()
    d.scheduler.admission.enqueue(second)
    plan = d.planned()
    assert d.flights[-1].admitted == [(second, 8)] and plan.block_copies == []


def test_nobody_is_alone_beside_one_that_waits_for_its_token():
    tiers = Tiers()
    d = Bench(relay=True, depth=2, tiers=tiers)
    first = d.add(3)
    d.planned()
    second = d.add(3)
    d.planned()
    assert tiers.of("join") == [first] and tiers.of("load") == [first, second, second]
