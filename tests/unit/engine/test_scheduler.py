"""What a plan holds: who goes first, how chunks are cut, who is preempted, how many plans are in flight."""

import pytest
from builders import Harness, assert_as_expected, harness, request
from test_engine_outputs import MODES

from tandem.workers.engine.observers.step_log import LoggedTimes, StepLog
from tandem.workers.messages.request import Abort
from tandem.workers.messages.step import StepPlan


def tokens_of(plan: StepPlan) -> list[int]:
    return [work.num_tokens for work in plan.work]


def step_until_running(h: Harness, count: int) -> None:
    while h.engine.stats().running < count:
        h.step()


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_once():
    h = harness(max_num_batched_tokens=10)
    h.add(request("a", 25, 1))
    h.run()
    assert [tokens_of(plan) for plan in h.executor.plans] == [[10], [10], [5]]
    assert [plan.work[0].samples for plan in h.executor.plans] == [False, False, True]


def test_decodes_come_before_prefills_in_every_step():
    h = harness(max_num_batched_tokens=10, num_blocks=200)
    h.add(request("a", 4, 30), request("b", 4, 30))
    h.step()
    h.add(request("long", 40, 2, priority=-5))
    before = len(h.executor.plans)
    h.run()
    for plan in h.executor.plans[before : before + 5]:
        assert sorted(tokens_of(plan))[:2] == [1, 1] and sum(tokens_of(plan)) <= 10


def test_lower_priority_numbers_are_admitted_first_then_arrival():
    h = harness(max_num_seqs=1)
    h.add(*(request(name, 3, 2, priority=p) for name, p in [("a", 1), ("b", 0), ("c", 0), ("d", -1)]))
    h.run()
    assert list(h.sink.ends) == ["d", "b", "c", "a"]


def test_the_latest_of_the_lowest_priority_is_preempted():
    h = harness(num_blocks=9, max_num_seqs=3, max_num_batched_tokens=64)
    h.add(request("a", 8, 20), request("low", 8, 20, priority=1), request("c", 8, 20))
    h.run()
    order = list(h.sink.ends)
    assert h.engine.stats().preemptions > 0
    assert order[-1] == "low" and order[0] == "a"


def test_nobody_overtakes_a_head_that_waits_for_blocks():
    h = harness(num_blocks=10)
    h.add(request("a", 20, 12), request("big", 28, 2), request("small", 2, 2))
    h.step()
    assert h.engine.stats().running == 1
    h.run()
    assert next(iter(h.sink.ends)) == "a"


def test_a_request_that_needs_the_whole_pool_is_served():
    h = harness(num_blocks=8)
    requests = [request("a", 20, 13), request("whole", 32, 1), request("b", 20, 13)]
    h.add(*requests)
    h.run()
    assert_as_expected(h, *requests)


def test_rows_and_tokens_of_a_step_are_bounded():
    h = harness(max_num_seqs=5, max_num_batched_tokens=12, num_blocks=300)
    h.add(*(request(f"r{i}", 1 + i % 20, 6) for i in range(30)))
    h.run()
    for plan in h.executor.plans:
        assert len(plan.work) <= 5 and sum(tokens_of(plan)) <= 12


def test_more_rows_than_tokens_in_a_step_starve_nobody():
    h = harness(max_num_seqs=8, max_num_batched_tokens=3, num_blocks=300)
    requests = [request(f"r{i}", 5, 30) for i in range(6)]
    h.add(*requests)
    h.run()
    assert_as_expected(h, *requests)


def test_async_scheduling_sends_the_next_plan_before_tokens_arrive():
    h = harness(asynchronous=True)
    h.add(request("a", 4, 6))
    h.step()
    assert len(h.executor.plans) == 2 and not h.sink.tokens.get(("a", 0), [])[1:]
    h.run()
    assert sum(map(len, map(tokens_of, h.executor.plans))) == 6, "an end by length never overruns"


def test_a_row_that_overran_is_discarded():
    h = harness(asynchronous=True)
    req = request("a", 4, 50, stop_token_ids=tuple(range(97)))
    h.add(req)
    h.run()
    assert h.sink.ends["a"].positions == [1]
    assert len(h.executor.plans) == 2 and h.engine.stats().wasted_tokens == 1


def test_chunks_of_one_prompt_fill_the_pipeline():
    h = harness(stages=4, max_num_batched_tokens=8)
    h.add(request("a", 30, 2))
    h.step()
    assert [tokens_of(plan) for plan in h.executor.plans] == [[8], [8], [8], [6]]
    h.run()


def test_decodes_spread_over_the_stages():
    h = harness(stages=4, max_num_seqs=16, num_blocks=300)
    h.add(*(request(f"r{i}", 2, 40) for i in range(16)))
    h.run()
    steady = h.executor.plans[20:100]
    assert max(len(plan.work) for plan in steady) == 4


@pytest.mark.parametrize("mode", MODES)
def test_priorities_and_preemption_keep_outputs(mode):
    h = harness(**mode, num_blocks=20, max_num_seqs=6)
    requests = [request(f"r{i}", 4 + i, 20, priority=i % 3) for i in range(12)]
    for req in requests:
        h.add(req)
        h.step()
    h.run()
    assert h.engine.stats().preemptions > 0
    assert_as_expected(h, *requests)


def test_the_inter_token_bound_sizes_chunks_from_measured_time():
    def device_s(plan: StepPlan) -> float:
        return 0.002 + 0.0001 * sum(tokens_of(plan))

    h = harness(max_itl_ms=20.0, max_num_batched_tokens=2048, num_blocks=2000, device_s=device_s, max_model_len=9000)
    h.add(request("stream", 4, 200))
    for _ in range(10):
        h.step()
    h.add(request("long", 4000, 2))
    before = len(h.executor.plans)
    h.run()
    chunks = [plan for plan in h.executor.plans[before:] if len(plan.work) == 2 and max(tokens_of(plan)) > 1]
    slow = [plan for plan in chunks if device_s(plan) > 0.020]
    assert not slow, "no step beside a stream takes longer than the bound"
    assert sum(tokens_of(chunks[-2])) > 100, "the bound is used, not merely kept"


def test_the_step_log_holds_every_plan(tmp_path):
    path = str(tmp_path / "steps.jsonl")
    h = harness(step_log=path)
    h.add(request("a", 9, 5, n=2))
    h.run()
    h.engine.close()
    assert StepLog.read(path) == h.executor.plans
    lines = list(StepLog.lines((tmp_path / "steps.jsonl").read_bytes()))
    times = [line for line in lines if isinstance(line, LoggedTimes)]
    assert [one.step_id for one in times] == [plan.step_id for plan in h.executor.plans]
    assert all(one.submitted_s <= one.returned_s for one in times)
    assert lines.index(times[0]) > 0, "a plan is written when it is sent, its times when it has returned"
    h.add(request("b", 3, 1))
    with pytest.raises(ValueError, match="closed file"):
        h.step()
    harness().engine.close()  # it has none


def test_stats_count_what_happened():
    h = harness(num_blocks=100)
    h.add(request("a", 9, 5), request("b", 6, 3))
    assert h.engine.stats().waiting == 2 and h.engine.stats().waiting_tokens == 15
    h.run()
    stats = h.engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished["length"]) == (15, 8, 2)
    assert stats.time_to_first_token_s.count == stats.e2e_latency_s.count == stats.queue_time_s.count == 2
    assert stats.inter_token_latency_s.count == 4 + 2
    assert stats.inter_token_latency_s.total == pytest.approx(6 * h.step_s)
    assert stats.iteration_tokens.count == stats.steps == len(h.executor.plans)
    assert stats.iteration_tokens.total == 15 + 4 + 2
    assert stats.cached_blocks > 0 and stats.used_blocks == 0


def test_requests_are_counted_by_size_and_time_once_they_have_ended():
    h = harness(num_blocks=100, max_num_seqs=4)
    h.add(request("a", 9, 5, n=2), request("never", 9, 5, n=4))
    while h.engine.requests.get("a") is not None:
        h.step()
    figures = h.engine.stats().requests
    totals = {name: getattr(figures, name).total for name in ("prompt_tokens", "generation_tokens", "max_tokens", "n")}
    assert totals == {"prompt_tokens": 9, "generation_tokens": 10, "max_tokens": 5, "n": 2}
    assert figures.most_generation_tokens.total == 5
    assert figures.prefill_s.total + figures.decode_s.total == pytest.approx(figures.inference_s.total)
    assert figures.time_per_output_token_s.total == pytest.approx(figures.decode_s.total / 4)
    assert figures.time_per_output_token_s.count == figures.prefill_s.count == 1
    assert figures.prompt_tokens.bounds[:5] == (1, 2, 5, 10, 20)
    assert figures.prompt_tokens.bounds[-1] <= h.engine.facts.max_model_len
    h.run()
    assert figures.n.count == 1 and h.engine.stats().requests.n.count == 2, "a copy counts no more"


def test_those_that_wait_are_counted_by_what_they_wait_for():
    h = harness(num_blocks=100, max_num_seqs=1)
    h.add(request("a", 9, 5, n=2), request("b", 9, 5))
    stats = h.engine.stats()
    assert stats.waiting_for == {"capacity": 2, "deferred": 1}, "one choice waits for the other's prompt"
    h.run()
    assert h.engine.stats().waiting_for == {"capacity": 0, "deferred": 0}


@pytest.mark.parametrize("chunk", [4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_a_prompt_are_found_while_its_last_chunks_are_still_to_come(mode, chunk):
    """Chunks of one or two whole blocks: a chunk that fills a block to its end makes that block findable."""
    h = harness(**mode, num_blocks=64, block_size=4, max_num_batched_tokens=chunk)
    first = request("first", 40, 2)
    h.add(first)
    (seq,) = h.engine.requests.get("first").sequences
    while not seq.num_computed:
        h.step()
    assert seq.num_computed % chunk == 0 and seq.num_computed < 40
    assert seq.table.num_committed == seq.num_computed // 4
    computed = seq.num_computed
    h.engine.abort(Abort(request_id="first", attempt=0))
    second = request("second", [*first.prompt_token_ids[:computed], 5], 2)
    h.add(second)
    h.run()
    assert_as_expected(h, second)
    assert h.sink.ends["second"].usage.cached_tokens == computed
