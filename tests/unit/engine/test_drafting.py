"""Draft budgets: what pays goes on, what does not pauses; and that defects of several tokens a row are noticed."""

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from builders import assert_as_expected, expected, harness, request
from fake_tiers import TierPlan

from tandem.configs.options import MAX_DRAFTS
from tandem.workers.attention.cpu_paged import DECODE_QUERIES
from tandem.workers.engine.base.draft_record import DraftRecord
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.sequence import Sequence, SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockTable
from tandem.workers.engine.drafting.drafting import EMPTY_STEPS, LONGEST_EMPTY_PAUSE, Drafting
from tandem.workers.engine.drafting.step_costs import COLD, MEASURE_EVERY, StepCosts
from tandem.workers.engine.observers.chunk_limiter import StepChunkLimiter
from tandem.workers.engine.results import ResultApplier
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.engine.waiting.probation import PROBATION_TOKENS, probation_tokens
from tandem.workers.messages.step import RowResult, RowWork, StepPlan, StepResult

MOST = 5
DEPTH1, ASYNC, PP2 = {"asynchronous": False}, {"asynchronous": True}, {"stages": 2}
Chances = Callable[[int, int, int], float]
"""Of a draft to be right behind right ones, by step, row and place."""


def always(chance: float) -> Chances:
    """The same chance for all."""
    return lambda step, row, place: chance


class Steps:
    """Steps without an engine: `rows` rows, of which new ones take the place of those that have had 200 tokens. A step
    takes 1 + token * (rows - 1 + drafts) + start + place * (most drafts of a row), with noise for the one who measures.
    Results come `behind` steps later. Tokens are those to be expected of the drafts, not what luck made of them."""

    def __init__(self, rows: int, token: float, place: float = 0.0, start: float = 0.0, behind: int = 0) -> None:
        self.drafting = Drafting(MOST)
        self.rows, self.token, self.place, self.start = rows, token, place, start
        self.records = [DraftRecord() for _ in range(rows)]
        self.lengths = [10 + 190 * row // rows for row in range(rows)]
        self.drafts: list[list[int]] = []
        self.tokens, self.seconds = 0.0, 0.0
        self.cold = 0  # steps with drafts to come that take ten times as long for whoever measures
        self._draw = random.Random(5)
        self._late: deque[tuple[InFlightStep, StepResult]] = deque()
        self._behind = behind

    def step_s(self, num_drafts: int, most: int) -> float:
        extra = self.token * num_drafts + self.start + self.place * most if num_drafts else 0.0
        return 1.0 + self.token * (self.rows - 1) + extra

    def run(self, steps: int, chances: Chances, noise: float = 0.05) -> float:
        """The tokens a second of so many steps, over those without drafts."""
        tokens, seconds = self.tokens, self.seconds
        for step in range(steps):
            self._step(len(self.drafts), partial(chances, step), noise)
        return (self.tokens - tokens) / (self.seconds - seconds) * self.step_s(0, 0) / self.rows

    def best(self, chance: float) -> float:
        """The most that any number of drafts brings, the same for all rows."""
        tokens, best = 1.0, 1.0
        for most in range(1, MOST + 1):
            tokens += chance**most
            best = max(best, tokens * self.step_s(0, 0) / self.step_s(most * self.rows, most))
        return best

    def _step(self, number: int, chances: Callable[[int, int], float], noise: float) -> None:
        may = self.drafting.begin_step(self.rows)
        drafts = [may and self.drafting.budget(*row) for row in zip(self.records, self.lengths, strict=True)]
        most, total = max(drafts), sum(drafts)
        for row, count in enumerate(drafts):
            accepted, all_right, goes_on = 0, 1.0, True
            for place in range(count):
                all_right *= chances(row, place)
                self.tokens += all_right
                goes_on = goes_on and self._draw.random() < chances(row, place)
                accepted += goes_on
            self.drafting.observe(self.records[row], count, accepted)
            self.lengths[row] += 1 + accepted
            if self.lengths[row] >= 200:
                self.records[row], self.lengths[row] = DraftRecord(), 10
        self.drafts.append(drafts)
        self.tokens += self.rows
        self.seconds += self.step_s(total, most)
        seconds = self.step_s(total, most) * self._draw.uniform(1 - noise, 1 + noise)
        if total and self.cold:
            self.cold, seconds = self.cold - 1, 10 * seconds
        draft_s = self.start + self.place * most if total else 0.0
        step = InFlightStep(number, num_decode=self.rows, num_drafts=total, most_drafts=most)
        self._late.append((step, StepResult(step_id=number, rows=[], device_s=seconds, draft_s=draft_s)))
        if len(self._late) > self._behind:
            came, result = self._late.popleft()
            self.drafting.returned(came, came.num_drafts, result)


COSTS = [(0.005, 0.0, 0.0), (0.02, 0.05, 0.0), (0.09, 0.0, 0.0), (0.09, 0.2, 0.0), (0.02, 0.0, 0.3), (0.3, 0.0, 0.0)]
"""Of a token, of a place (a pass of a draft model) and of any drafts, beside a step of one row."""


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_it_drafts_nearly_as_is_best_and_is_never_slower_than_off(rows: int, costs: tuple[float, float, float]) -> None:
    for chance in (0.0, 0.3, 0.6, 0.9):
        steps, chances = Steps(rows, *costs), always(chance)
        assert steps.run(250, chances) >= 0.97, "from a fresh start"
        rate = steps.run(350, chances)
        assert rate >= max(0.98, 0.9 * steps.best(chance)), (chance, rate, steps.best(chance))


@pytest.mark.parametrize("rows", [1, 4])
def test_slow_first_steps_with_drafts_do_not_end_them(rows: int) -> None:
    """In them ranks make what they make once: memory, captures, kernels."""
    steps = Steps(rows, 0.02)
    steps.cold = COLD
    assert steps.run(60, always(0.8)) >= 1.5
    assert sum(map(sum, steps.drafts[-20:])) >= 40 * rows


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_it_is_never_slower_than_off_when_chances_change_or_differ(
    rows: int, costs: tuple[float, float, float], behind: int
) -> None:
    kinds: dict[str, Chances] = {
        "fall": lambda step, row, place: 0.9 if step < 200 else 0.0,
        "rise": lambda step, row, place: 0.0 if step < 200 else 0.9,
        "rows that differ": lambda step, row, place: 0.9 if row % 2 else 0.0,
        "places that differ": lambda step, row, place: (0.7, 0.4, 0.2, 0.1, 0.1)[place],
        "right or wrong as a whole": lambda step, row, place: 0.3 if place == 0 else 0.95,
    }
    for name, chances in kinds.items():
        assert Steps(rows, *costs, behind=behind).run(400, chances) >= 0.97, name


@pytest.mark.parametrize(("token", "place", "most"), [(0.02, 0.0, 5), (0.1, 0.1, 4), (0.4, 0.0, 2), (0.0, 0.6, 1)])
def test_the_number_of_drafts_is_the_one_that_pays(token: float, place: float, most: int) -> None:
    """One row, drafts right in 8 of 10 cases: the rate (1 - 0.8^(k+1)) / 0.2 / (1 + (token + place) k) is highest at
    `most`, by hand."""
    steps = Steps(1, token, place)
    steps.run(500, always(0.8))
    mean = sum(map(sum, steps.drafts[200:])) / 300
    assert abs(mean - most) < 1, mean


def test_rows_whose_drafts_are_right_have_more_of_them() -> None:
    steps = Steps(4, 0.09)
    steps.run(400, lambda step, row, place: 0.9 if row % 2 else 0.1)
    means = [sum(drafts[row] for drafts in steps.drafts[100:]) / 300 for row in range(4)]
    assert min(means[1], means[3]) > 2.5 and max(means[0], means[2]) < 0.7, means


def test_a_batch_that_is_full_has_no_drafts_but_to_try() -> None:
    """Each token costs as much as a row's step: whatever is right, drafts bring at most what they cost."""
    steps = Steps(64, 1.0)
    steps.run(400, always(0.6))
    assert sum(map(sum, steps.drafts[50:])) < 0.02 * 350 * 64


def test_tries_take_a_hundredth_of_the_time_at_most_and_become_rare() -> None:
    for rows in (1, 16):
        steps = Steps(rows, 0.1)
        steps.run(100, always(0.0))
        early, seconds = steps.run(400, always(0.0)), steps.seconds
        assert 0.985 <= early < 1.0
        if rows == 1:  # one sequence of which there is no end
            steps.lengths[0] = -10_000
            late = steps.run(4000, always(0.0))
            assert late > 0.998 and steps.seconds > seconds


def test_the_same_results_bring_the_same_drafts() -> None:
    drafts = []
    for _ in range(2):
        steps = Steps(4, 0.09, 0.05)
        steps.run(200, always(0.6))
        drafts.append(steps.drafts)
    assert drafts[0] == drafts[1]


def test_a_step_in_which_the_machine_did_something_else_changes_little() -> None:
    steps = Steps(1, 0.05)
    steps.run(200, always(0.8))
    costs, before = steps.drafting.costs, steps.drafting.costs.prices(1)
    costs.observe(1, 4, 4, 500.0)
    assert costs.prices(1).seconds(4, 4) < 1.5 * before.seconds(4, 4)
    assert steps.run(200, always(0.8)) > 0.9 * steps.best(0.8)
    costs.observe(1, 0, 0, 500.0)
    assert costs.prices(1).step < 1.5
    for _ in range(100):
        for count in (0, 4):
            costs.observe(1, count, count, 10.0 + 0.5 * count)
    assert costs.prices(1).seconds(4, 4) == pytest.approx(12.0, rel=0.02), "it follows what goes on"


def test_the_line_of_rows_goes_through_steps_of_many_sizes() -> None:
    costs = StepCosts()
    for _ in range(100):
        for rows in (1, 4, 9):
            costs.observe(rows, 0, 0, 0.02 + 0.001 * rows)
    assert costs.prices(5).step == pytest.approx(0.025, rel=0.02)
    assert costs.knows(9) and not costs.knows(40), "far from what was measured"


def test_what_a_guess_takes_is_told_apart_from_what_checking_it_takes() -> None:
    costs = StepCosts()
    for _ in range(60):
        for count in (0, 1, 4):
            guess_s = 0.001 + 0.002 * count if count else 0.0
            costs.observe(2, 2 * count, count, 0.1 + 0.01 * 2 * count + guess_s, guess_s)
    prices = costs.prices(2)
    assert prices.draft == pytest.approx(0.01, rel=0.05) and prices.place == pytest.approx(0.002, rel=0.1)
    assert prices.seconds(8, 4) == pytest.approx(0.1 + 0.08 + 0.009, rel=0.02)


def test_steps_without_drafts_are_measured_now_and_then() -> None:
    steps = Steps(1, 0.01)
    steps.run(400, always(1.0))
    empty = [number for number, drafts in enumerate(steps.drafts) if drafts == [0]]
    assert 400 // MEASURE_EVERY <= len(empty) <= 400 // MEASURE_EVERY + 3


def test_prefills_in_a_step_tell_nothing_of_drafts() -> None:
    drafting = Drafting(MOST)
    step = InFlightStep(1, num_decode=4, num_prefill_tokens=64)
    drafting.returned(step, 0, StepResult(step_id=1, rows=[], device_s=1.0))
    assert not drafting.begin_step(4), "no step of decodes alone was seen"


def test_what_was_not_guessed_says_nothing() -> None:
    drafting, record = Drafting(MOST), DraftRecord()
    drafting.observe(record, 0, 0)
    assert record == DraftRecord() or (record.chance, record.tried) == (-1.0, 0.0)
    assert drafting.stats().num_drafts == 0


@pytest.mark.parametrize("mode", [DEPTH1, ASYNC, PP2], ids=["depth1", "async", "pp2"])
def test_an_engine_drafts_what_is_accepted_and_stops_what_is_not(mode: dict[str, Any]) -> None:
    def step_s(plan: StepPlan) -> float:
        return 0.01 + 0.001 * sum(work.num_tokens + work.max_drafts for work in plan.work)

    counts = []
    for right in (0, 4):
        h = harness(**mode, drafts=4, num_blocks=200, device_s=step_s)
        h.executor.proposes = lambda context, right=right: (4, right)
        h.add(request("r", 4, 400))
        h.run()
        stats = h.engine.stats().drafts
        assert stats is not None
        counts.append((stats.num_draft_tokens, stats.num_accepted))
    (wrong, none), (drafted, accepted) = counts
    assert wrong <= 40 and none == 0
    assert drafted == accepted >= 250


def test_drafts_are_accepted_up_to_the_end_of_the_sequence() -> None:
    """Tokens behind a stop id or max_tokens are dropped, and neither said nor billed."""
    for max_tokens in range(1, 12):
        h = harness(drafts=4, num_blocks=40)
        h.executor.proposes = lambda context: (4, 4)
        stops, least = tuple(range(2, 97, 9)), 3 if max_tokens > 3 else 0
        one = request("one", 9, max_tokens, stop_token_ids=stops, min_tokens=least)
        h.add(one)
        h.run()
        assert_as_expected(h, one)
        stats = h.engine.stats()
        assert stats.generation_tokens == h.sink.ends["one"].usage.completion_tokens


def all_kinds_of_histories(
    tiers: TierPlan | None = None, modes: tuple[dict[str, Any], ...] = (DEPTH1, ASYNC, PP2)
) -> Counter[str]:
    """Requests that share prompts, end amid drafts and go on where others ended, in a large pool and in one that they
    thrash: a wrong block is soon found by content. Returns how many sequences were preempted and how many tokens were
    found or loaded."""
    counts: Counter[str] = Counter()
    for seed, mode, num_blocks in itertools.product(range(6), modes, (14, 60)):
        h = harness(drafts=4, num_blocks=num_blocks, max_num_seqs=3, tiers=tiers, patience=60, **mode)
        h.executor.proposes = lambda context: (4, context % 4)
        stops = tuple(range(5, 97, 11))
        first = [
            request(f"a{seed}{i}", [2 + j % 7 for j in range(5 + i)], 12, stop_token_ids=stops if i % 4 else ())
            for i in range(8)
        ]
        h.add(*first)
        h.run()
        again = []
        for one in first:
            said = h.sink.tokens[one.request_id, 0]
            again.append(request(one.request_id + "b", [*one.prompt_token_ids, *said, 9], 6))
        h.add(*again)
        h.run()
        assert_as_expected(h, *first, *again)
        stats = h.engine.stats()
        counts += Counter(preempted=stats.preemptions, found=stats.prefix_cache_hits)
        counts += Counter(loaded=0 if stats.offload is None else stats.offload.loaded_tokens)
    return counts


TIERS = pytest.mark.parametrize("tiers", [None, TierPlan(host_slots=40)], ids=["device", "host tier"])


@TIERS
def test_histories_without_a_defect(tiers: TierPlan | None) -> None:
    """And what they are for has happened in them."""
    happens = {"preempted", "found"} | ({"loaded"} if tiers is not None else set())
    assert all_kinds_of_histories(tiers).keys() == happens


def test_a_commit_of_rejected_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last known token's slot holds the KV of the draft that was rejected in its place. With a step in flight
    behind it that step would make it right."""
    accept = ResultApplier._accept_drafts

    def defective(self: ResultApplier, seq: Sequence, row: RowResult) -> RowResult:
        kept = accept(self, seq, row)
        if seq.status is SequenceStatus.RUNNING:
            known = [*seq.tokens, *kept.token_ids]
            num_rejected = row.num_drafts - (len(row.token_ids) - 1)
            self._manager.commit(seq.table, known, min(seq.num_computed + num_rejected, len(known)))
        return kept

    monkeypatch.setattr(ResultApplier, "_accept_drafts", defective)
    with pytest.raises(AssertionError, match="wrong KV at position"):
        all_kinds_of_histories(modes=(DEPTH1,))


@pytest.mark.parametrize(
    ("mode", "because"),
    [(DEPTH1, "wrong KV at position"), (ASYNC, r"block\(s\) .* of a store written by a plan in flight")],
    ids=["depth1", "async"],
)
def test_a_store_of_rejected_tokens_is_caught(
    mode: dict[str, Any], because: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of the device is right; the host gets the block of the last known token too, and others find it."""
    accept, store = ResultApplier._accept, KVOffload._store_blocks
    rejecting: dict[BlockTable, Sequence] = {}

    def noted(self: ResultApplier, seq: Sequence, row: RowResult, *more: Any) -> None:
        rejecting.pop(seq.table, None)
        if row.num_drafts > len(row.token_ids) - 1:
            rejecting[seq.table] = seq
        accept(self, seq, row, *more)

    def defective(self: KVOffload, table: BlockTable) -> None:
        num_committed = table.num_committed
        if table in rejecting:
            tokens, manager = rejecting[table].tokens, self._manager
            table.num_committed = len(tokens) // manager.block_size
            manager._keys(table, tokens, table.num_committed)
        store(self, table)
        table.num_committed = num_committed

    monkeypatch.setattr(ResultApplier, "_accept", noted)
    monkeypatch.setattr(KVOffload, "_store_blocks", defective)
    with pytest.raises(AssertionError, match=because):
        all_kinds_of_histories(TierPlan(host_slots=40), (mode,))


def test_drafts_without_blocks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = Scheduler._extend_or_preempt

    def defective(self: Scheduler, seq: Sequence, num_tokens: int) -> list[int] | None:
        return extend(self, seq, min(num_tokens, seq.num_known))

    monkeypatch.setattr(Scheduler, "_extend_or_preempt", defective)
    with pytest.raises(AssertionError, match="the table does not cover the tokens"):
        all_kinds_of_histories()


def test_drafts_in_flight_that_are_forgotten_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the next step are then too few for what the ranks may know by then."""
    grow = Scheduler._grow

    def defective(self: Scheduler, step: InFlightStep, seq: Sequence, *drafts: int) -> RowWork | None:
        work = grow(self, step, seq, *drafts)
        seq.num_drafts = 0
        return work

    monkeypatch.setattr(Scheduler, "_grow", defective)
    with pytest.raises(AssertionError, match="the table does not cover the tokens"):
        all_kinds_of_histories()


def test_a_budget_for_nothing_pauses_shortly_and_a_guess_ends_that() -> None:
    drafting, record, asked = Drafting(MOST), DraftRecord(), []
    drafting.costs.observe(1, 0, 0, 1.0)
    for length in range(400):
        assert drafting.begin_step(1)
        if drafting.budget(record, length):
            asked.append(length)
            drafting.observe_none(record, length)
    gaps = [later - earlier for earlier, later in pairwise(asked)]
    assert gaps[: EMPTY_STEPS - 1] == [1] * (EMPTY_STEPS - 1) and gaps[EMPTY_STEPS - 1] == EMPTY_STEPS
    assert max(gaps) == LONGEST_EMPTY_PAUSE
    drafting.observe(record, MOST, 2)
    assert record.num_empty == 0


def test_drafts_leave_half_of_a_step_to_prefills() -> None:
    """Rows that decode with many drafts, and more requests than fit at once: these get their rows soon."""
    h = harness(drafts=16, num_blocks=400, max_num_seqs=8, max_num_batched_tokens=32)
    h.add(*(request(f"a{i}", 4, 60) for i in range(2)))
    for _ in range(4):
        h.step()
    h.add(*(request(f"b{i}", 4, 4) for i in range(6)))
    h.step()
    plan = h.executor.plans[-1]
    assert sum(work.max_drafts for work in plan.work) <= 16 - 2, "the two that decode have a token each"
    assert len(plan.new_rows) >= 3
    h.run()


@pytest.mark.parametrize("prompt", range(4, 9))
@pytest.mark.parametrize("mode", [{}, {"asynchronous": True}], ids=["depth1", "async"])
def test_choices_with_drafts_write_no_block_that_they_share(mode: dict[str, bool], prompt: int) -> None:
    asked = request("r", prompt, 12, n=3, temperature=1.0)
    h = harness(**mode, drafts=4, num_blocks=200)
    h.add(asked)
    h.run()
    assert_as_expected(h, asked)
    stats = h.engine.stats().drafts
    assert stats is not None and stats.num_accepted > 0


def test_no_drafts_while_steps_are_short_of_memory() -> None:
    h = harness(drafts=4, num_blocks=400, room=lambda step_id: 5 if step_id == 6 else 99)
    h.executor.proposes = lambda context: (4, 4)
    h.add(*(request(f"r{i}", 4, 200) for i in range(3)))
    drafts: dict[bool, list[int]] = {False: [], True: []}
    while h.engine.has_work():
        is_reduced = h.engine.scheduler._limit.is_reduced
        h.step()
        drafts[is_reduced].append(sum(work.max_drafts for work in h.executor.plans[-1].work))
    assert len(drafts[True]) > 10 and not any(drafts[True])
    assert sum(drafts[False]) > 100


@pytest.mark.parametrize("pace", [None, 13])
def test_drafts_count_among_the_tokens_of_a_step_beside_prompts(
    pace: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against --max-num-batched-tokens, and without the tokens that decode against the bound of --max-itl-ms."""
    monkeypatch.setattr(StepChunkLimiter, "limit", lambda limiter: pace)
    h = harness(drafts=4, num_blocks=400, max_itl_ms=None if pace is None else 10.0)
    h.executor.proposes = lambda context: (4, 4)
    h.add(*(request(f"a{i}", 4, 60) for i in range(2)))
    for _ in range(4):
        h.step()
    h.add(*(request(f"b{i}", 70, 4) for i in range(2)))
    beside = 0
    while h.engine.has_work():
        h.step()
        work = h.executor.plans[-1].work
        drafts, decodes = sum(one.max_drafts for one in work), sum(one.max_drafts > 0 for one in work)
        tokens = sum(one.num_tokens for one in work) + drafts
        if decodes == 2 and tokens - drafts > decodes:
            beside += 1
            assert tokens <= (32 if pace is None else decodes + pace)
            assert pace is None or drafts <= pace // 2, "half of it is left for prompts"
    assert beside >= 3, "drafts were beside chunks of a prompt"


def test_a_request_on_probation_has_no_drafts_and_comes_further() -> None:
    h = harness(drafts=4, num_blocks=200)
    h.executor.proposes = lambda context: (4, 4)
    h.add(request("suspect", 4, 40, suspect=True), request("other", 4, 40))
    h.step()
    seq = h.engine.requests.get("suspect").sequences[0]
    while h.engine.scheduler.alone is not None:
        h.step()
        last = h.executor.plans[-1]
        if seq.row in [work.row for work in last.work] and h.engine.scheduler.alone is not None:
            assert [work.max_drafts for work in last.work] == [0]
    assert h.engine.requests.get("suspect").sequences[0].num_output >= probation_tokens(4) > PROBATION_TOKENS
    h.run()


def test_tokens_before_an_error_behind_drafts_are_delivered() -> None:
    bad = request("bad", 5, 20)
    h = harness(drafts=4, fail_at=frozenset({(bad.sampling.seed, 0, 7)}))
    h.executor.proposes = lambda context: (4, 4)
    h.add(bad)
    h.run()
    tokens, _ = expected(bad, 0, 512)
    assert h.sink.tokens["bad", 0] == tokens[:7] and h.sink.reasons["bad", 0] == "error"
    assert h.sink.ends["bad"].usage.completion_tokens == 7


def test_the_decode_kernel_takes_a_token_and_all_its_drafts() -> None:
    assert 1 + MAX_DRAFTS <= DECODE_QUERIES


def test_each_step_tells_its_drafts_with_its_tokens() -> None:
    """The sums are those of /metrics, with drafts behind the end of a choice, and where none was guessed."""
    h = harness(drafts=4, num_blocks=200)
    h.executor.proposes = lambda context: (context % 5, context % 3)
    h.add(*(request(f"r{i}", 4 + i, 30 + i) for i in range(4)))
    h.run()
    told = [delta.drafts for batch in h.sink.batches for delta in batch if delta.drafts is not None]
    stats = h.engine.drafting.stats()
    assert all(0 <= accepted <= guessed and guessed >= 1 for guessed, accepted in told)
    assert (len(told), sum(g for g, _ in told)) == (stats.num_drafts, stats.num_draft_tokens)
    assert sum(accepted for _, accepted in told) == stats.num_accepted > 0
