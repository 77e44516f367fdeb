"""Draft budgets: what pays goes on, what does not pauses; and that defects of several tokens a row are noticed."""

import itertools
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from builders import assert_as_expected, expected, harness, request
from fake_tiers import TierPlan

from tandem.configs.options import MAX_DRAFTS
from tandem.workers.attention.cpu_paged import DECODE_QUERIES
from tandem.workers.engine.base.drafting import (
    EMPTY_STEPS,
    FIRST_PAUSE,
    LONGEST_EMPTY_PAUSE,
    LONGEST_PAUSE,
    PROBE_EVERY,
    Drafting,
    DraftRecord,
    StepLine,
)
from tandem.workers.engine.base.in_flight_step import InFlightStep
from tandem.workers.engine.base.sequence import Sequence, SequenceStatus
from tandem.workers.engine.blocks.block_manager import BlockTable
from tandem.workers.engine.observers.chunk_limiter import StepChunkLimiter
from tandem.workers.engine.results import ResultApplier
from tandem.workers.engine.scheduler import Scheduler
from tandem.workers.engine.transfers.kv_offload import KVOffload
from tandem.workers.engine.waiting.probation import PROBATION_TOKENS, probation_tokens
from tandem.workers.messages.step import RowResult, RowWork

MOST = 5
DEPTH1, ASYNC = {"asynchronous": False}, {"asynchronous": True}


def measured(step_s: float, token_s: float) -> Drafting:
    """A budget that has seen steps of step_s seconds and token_s more for each token."""
    drafting = Drafting(MOST)
    for num_tokens in (1, 6, 2, 4, 1, 6):
        drafting.observe_step(num_tokens, 0, step_s + token_s * num_tokens)
    return drafting


def test_the_line_goes_through_the_latest_steps() -> None:
    line = StepLine()
    assert not line.is_known
    for _ in range(100):
        line.observe(3, 0.5)
    assert not line.is_known, "one size tells no slope"
    for _ in range(400):
        for num_tokens in (1, 4, 9):
            line.observe(num_tokens, 0.02 + 0.001 * num_tokens)
    assert line.seconds(5) == (pytest.approx(0.025, rel=1e-3), pytest.approx(0.001, rel=1e-2))


@pytest.mark.parametrize("num_prefill", [0, 64], ids=["decodes", "prefills in every step"])
@pytest.mark.parametrize("step_s", [0.0, 0.01], ids=["time of a step", "time of a token"])
def test_it_switches_off_when_all_steps_are_alike(num_prefill: int, step_s: float) -> None:
    """From a fresh start: nothing was measured, then steps of one size; drafts are never right."""
    drafting, record, drafted = Drafting(MOST), DraftRecord(), 0
    for length in range(600):
        num_drafts = drafting.budget(record, length, 1)
        drafted += num_drafts > 0
        drafting.observe(record, num_drafts, 0)
        num_tokens = 1 + num_drafts + num_prefill
        drafting.observe_step(num_tokens, num_prefill, 0.01 + (0.01 - step_s) * num_tokens)
    assert drafted <= 30, f"{drafted} of 600 steps drafted"


def test_steps_of_one_size_are_measured_beside_one_without_drafts() -> None:
    """Three of five are right in each, and a token takes as long as a step: that does not pay, once it is seen."""
    drafting, drafted = Drafting(MOST), 0
    records = [DraftRecord() for _ in range(8)]
    for length in range(400):
        budgets = [drafting.budget(record, length, 8) for record in records]
        for record, num_drafts in zip(records, budgets, strict=True):
            drafting.observe(record, num_drafts, min(3, num_drafts))
        drafted += sum(budgets) > 0
        drafting.observe_step(8 + sum(budgets), 0, 0.0001 + 0.001 * (8 + sum(budgets)))
    assert drafted <= 40, f"{drafted} of 400 steps drafted"


@pytest.mark.parametrize("mode", [{}, {"asynchronous": True}], ids=["depth1", "async"])
def test_an_engine_stops_drafting_what_is_never_accepted(mode: dict[str, bool]) -> None:
    h = harness(**mode, drafts=4, num_blocks=200, device_s=lambda plan: 0.01)
    h.executor.proposes = lambda context: (4, 0)
    h.add(request("r", 4, 400))
    h.run()
    assert h.engine.stats().drafts.num_drafts <= 30


def test_a_line_needs_sizes_that_differ_by_some_percent() -> None:
    for sizes, is_known in (((100, 108), False), ((100, 130), True), ((2, 3), True)):
        line = StepLine()
        for num_tokens in sizes * 50:
            line.observe(num_tokens, 0.01)
        assert line.is_known is is_known, sizes


def test_a_step_in_which_the_machine_did_something_else_changes_little() -> None:
    drafting, record = measured(0.01, 0.001), DraftRecord()
    drafting.observe_step(6, 0, 5.0)
    assert drafting.budget(record, 20, 1) == MOST
    slower = measured(0.01, 0.001)
    for _ in range(100):
        for num_tokens in (1, 6):
            slower.observe_step(num_tokens, 0, 0.1 + 0.01 * num_tokens)
    assert slower.step_seconds(4)[0] == pytest.approx(0.14, rel=0.05), "it follows what goes on"


def test_older_drafts_count_less() -> None:
    drafting, record = Drafting(MOST), DraftRecord(num_drafts=10.0, num_accepted=5.0)
    drafting.observe(record, 4, 1)
    assert (record.num_drafts, record.num_accepted) == (pytest.approx(13.0), pytest.approx(5.5))


def test_at_the_bounds_it_drafts() -> None:
    assert Drafting(MOST).budget(DraftRecord(num_drafts=10.0, num_accepted=2.0), 5, 1) == MOST
    assert Drafting(MOST).budget(DraftRecord(num_drafts=10.0, num_accepted=1.9), 5, 1) == 0
    least = DraftRecord(num_drafts=100.0, num_accepted=5.0)
    assert measured(0.01, 0.0).budget(least, 5, 1) == measured(0.0, 0.0).budget(least, 5, 1) == MOST
    assert measured(0.01, 0.0).budget(DraftRecord(num_drafts=100.0, num_accepted=4.9), 5, 1) == 0


def test_one_step_in_eight_goes_without_drafts_while_nothing_else_tells_their_cost() -> None:
    drafting, record = Drafting(MOST), DraftRecord()
    budgets = []
    for length in range(80):
        budgets.append(drafting.budget(record, length, 1))
        drafting.observe(record, MOST, MOST)
        drafting.observe_step(64, 0, 0.01)
    assert budgets.count(0) == 80 // PROBE_EVERY and budgets.count(MOST) == 80 - 80 // PROBE_EVERY


def test_a_sequence_whose_drafts_are_accepted_goes_on() -> None:
    drafting, record = measured(0.01, 0.001), DraftRecord()
    for length in range(10, 600, 6):
        assert drafting.budget(record, length, 1) == MOST
        drafting.observe(record, MOST, MOST)
    assert drafting.stats().accepted_per_position == (99,) * MOST
    assert drafting.stats().num_accepted == drafting.stats().num_draft_tokens == 99 * MOST


def test_a_sequence_whose_drafts_are_not_accepted_pauses_ever_longer() -> None:
    drafting, record, asked = measured(0.01, 0.001), DraftRecord(), []
    for length in range(20_000):
        if drafting.budget(record, length, 1):
            asked.append(length)
            drafting.observe(record, MOST, 0)
    gaps = [later - earlier for earlier, later in pairwise(asked) if later - earlier > 1]
    assert gaps[0] >= FIRST_PAUSE and gaps == sorted(gaps) and gaps[-1] >= LONGEST_PAUSE
    assert len(asked) < 20_000 * 0.01, "drafts that nobody needs are rare"


def test_no_draft_where_a_token_costs_as_much_as_a_step() -> None:
    """As in a batch that is limited by computation: a draft costs what its token would."""
    drafting, record = measured(0.0001, 0.01), DraftRecord()
    assert drafting.budget(record, 10, 32) == 0
    assert drafting.budget(record, 10 + FIRST_PAUSE - 1, 1) == 0
    assert measured(0.01, 0.0001).budget(DraftRecord(), 10, 32) == MOST


def test_what_was_not_guessed_says_nothing() -> None:
    drafting, record = measured(0.01, 0.001), DraftRecord()
    before = record.acceptance
    drafting.observe(record, 0, 0)
    assert record.acceptance == before and drafting.stats().num_drafts == 0


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
    tiers: TierPlan | None = None, modes: tuple[dict[str, Any], ...] = (DEPTH1, ASYNC)
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

    def defective(self: Scheduler, step: InFlightStep, seq: Sequence, num_drafts: int) -> RowWork | None:
        work = grow(self, step, seq, num_drafts)
        seq.num_drafts = 0
        return work

    monkeypatch.setattr(Scheduler, "_grow", defective)
    with pytest.raises(AssertionError, match="the table does not cover the tokens"):
        all_kinds_of_histories()


def test_a_budget_for_nothing_pauses_shortly_and_a_guess_ends_that() -> None:
    drafting, record = measured(0.01, 0.001), DraftRecord()
    asked = []
    for length in range(400):
        if drafting.budget(record, length, 1):
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
    h = harness(drafts=4, num_blocks=400, room=lambda step_id: 5 if step_id == 2 else 99)
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
