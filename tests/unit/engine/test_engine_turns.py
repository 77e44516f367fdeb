"""What the engine's turns say of themselves: whether there was progress, how long they wait, where the time went."""

import math
from typing import Any
from unittest import mock

import pytest
from builders import Harness, harness, request
from fake_adapters import AdapterPlan
from fake_tiers import TierPlan

from tandem.workers.engine.engine import FLUSH_POLL_S
from tandem.workers.engine.rank_answers import CACHE_WAIT_S
from tandem.workers.messages.request import AdapterRef


def taking(h: Harness, owner: Any, name: str, seconds: float, given: list[Any] | None = None) -> Any:
    """A method that takes so many seconds of the clock. given: gets its arguments."""
    method = getattr(owner, name)

    def take(argument: Any) -> Any:
        h.clock.now_s += seconds
        if given is not None:
            given.append(argument)
        return method(argument)

    return mock.patch.object(owner, name, take)


def storing(**plan: Any) -> Harness:
    """An engine without work whose blocks are on their way to the host, and stay that."""
    h = harness(tiers=TierPlan(host_slots=64, delay=lambda transfer, rank: None, **plan), patience=100)
    h.add(request("a", 9, 2))
    while h.engine.has_work():
        h.step()
    assert h.engine.is_copying
    return h


def test_seconds_are_counted_where_they_were_spent() -> None:
    h = harness(device_s=lambda plan: 0.25)
    h.add(request("a", 3, 2))
    h.step_s = 64.0
    with (
        taking(h, h.executor, "submit", 1.0),
        taking(h, h.executor, "poll", 16.0),
        taking(h, h.sink, "deltas", 4.0),
    ):
        h.run()
    stats = h.engine.stats()
    assert (stats.steps, stats.device_s) == (2, 0.5)
    assert (stats.schedule_s, stats.wait_s) == (2 * (1.0 + 4.0), 2 * 16.0)
    assert stats.queue_time_s.total == stats.tenants["default"].queue_s == 64.0
    assert stats.e2e_latency_s.total == 2 * (64.0 + 1.0 + 16.0 + 4.0)


def test_transfers_are_flushed_until_they_end() -> None:
    h = harness(tiers=TierPlan(host_slots=64, delay=lambda transfer, rank: 7), patience=100)
    h.add(request("a", 9, 2))
    while h.engine.has_work():
        h.step()
    assert h.engine.is_copying
    h.engine.flush_transfers(0.001)
    assert not h.engine.is_copying and h.tiers.kinds()["store"] == 2


def test_a_flush_ends_when_its_time_is_over() -> None:
    h = storing()
    waits: list[float] = []
    h.clock.now_s = 200.0
    with taking(h, h.executor, "poll", 0.25, waits):
        h.engine.flush_transfers(1.0)
    assert waits == [FLUSH_POLL_S] * 4 and h.engine.is_copying


def test_a_flush_goes_on_with_no_request() -> None:
    h = storing()
    h.add(request("b", 9, 20))
    h.step()
    num_plans = len(h.executor.plans)
    h.engine.flush_transfers(1.0)
    assert len(h.executor.plans) == num_plans


def waits(h: Harness) -> list[float]:
    """How long the next turn waits for the ranks, if it does."""
    waited: list[float] = []
    with taking(h, h.executor, "poll", 0.0, waited):
        h.engine.turn(0.5)
    return waited[:1]


def test_what_moves_decides_how_long_a_turn_waits_for_the_ranks() -> None:
    """Of adapters alone little: their sources are slow, and requests come. Of KV, or a step: as long as is said."""
    h = harness(adapters=AdapterPlan(delay=lambda move, rank: None), patience=100)
    h.engine.set_pinned_adapters([AdapterRef(name="a", digest="a", source="a")])
    assert waits(h) == [CACHE_WAIT_S]
    h.add(request("b", 3, 4))
    assert waits(h) == [0.5]
    assert waits(storing()) == [0.5]
    assert waits(harness()) == [], "there is nothing to wait for"


def test_a_plan_and_its_result_are_progress_and_the_wait_between_them_is_none() -> None:
    h = harness(stalls=2)
    h.add(request("a", 3, 1))
    assert [h.step() for _ in range(4)] == [True, False, True, False]
    assert h.sink.ends["a"].positions == [1]


def test_each_ranks_answer_is_progress_though_nobody_waits_for_it() -> None:
    h = harness(tiers=TierPlan(host_slots=64, delay=lambda transfer, rank: 3), patience=100)
    h.add(request("a", 9, 1))
    assert [h.step() for _ in range(6)] == [True, False, False, False, True, False]
    assert not h.engine.is_copying
    h = harness(adapters=AdapterPlan(delay=lambda move, rank: 2), patience=100)
    h.engine.set_pinned_adapters([AdapterRef(name="a", digest="a", source="a")])
    assert [h.step() for _ in range(7)] == [False, False, True, False, False, True, False], "fetched, and placed"
    assert not h.engine.is_copying


def test_what_ends_without_a_step_is_progress_and_the_turn_does_not_wait() -> None:
    h = harness(adapters=AdapterPlan(delay=lambda move, rank: None), patience=100)
    h.add(request("a", 3, 4, adapter="a", deadline_s=1.0))
    assert not any(h.step() for _ in range(3)) and h.engine.is_copying
    h.clock.now_s += 2.0
    waited: list[float] = []
    with taking(h, h.executor, "poll", 0.0, waited):
        assert h.engine.turn(0.5)
    assert not waited and h.sink.ends["a"].refused is not None


def test_an_engine_without_work_says_when_it_must_be_turned() -> None:
    assert harness().engine.idle_s == math.inf
    h = harness(adapters=AdapterPlan(refuses=lambda move, rank: "it is broken"), patience=100)
    assert h.engine.idle_s == math.inf
    h.engine.set_pinned_adapters([AdapterRef(name="a", digest="a", source="a")])
    h.drain_transfers()
    assert 0.0 < h.engine.idle_s < math.inf
    h.clock.now_s += h.engine.idle_s
    assert h.engine.idle_s == pytest.approx(0.0)


@pytest.mark.parametrize(("block_bytes", "loaded"), [(8_000_000, 6), (32_000_000, 0)])
def test_the_first_guess_of_a_loads_time_is_of_one_ranks_part(block_bytes: int, loaded: int) -> None:
    """24 tokens take 24 ms to compute again; six blocks 13 ms to load if each rank loads its half of them, or 49 ms."""
    h = harness(
        num_blocks=12,
        tiers=TierPlan(host_slots=64, num_ranks=2, block_bytes=block_bytes),
        device_s=lambda plan: 0.001 * sum(work.num_tokens for work in plan.work),
        patience=100,
    )
    for name, prompt in (("first", 24), ("over", 40), ("over again", 40)):
        h.add(request(name, prompt, 2))
        h.run()
    h.add(request("again", [*request("first", 24).prompt_token_ids, 5], 2))
    h.run()
    assert h.tiers.kinds()["load"] == loaded


def test_drafts_count_among_the_tokens_of_a_step() -> None:
    h = harness(drafts=3, max_itl_ms=1000.0)
    drafting, limiter = h.engine.drafting, h.engine.scheduler._chunk_limiter
    assert drafting is not None
    with (
        mock.patch.object(drafting.costs, "observe", wraps=drafting.costs.observe) as of_drafting,
        mock.patch.object(limiter, "observe", wraps=limiter.observe) as of_limiter,
    ):
        h.add(request("a", 5, 30))
        h.run()
    num_drafts = h.executor.num_accepted + h.executor.num_rejected
    num_tokens = sum(work.num_tokens for plan in h.executor.plans for work in plan.work) + num_drafts
    assert num_drafts
    assert sum(call.args[0] + call.args[1] for call in of_drafting.call_args_list) == num_tokens - 5, "of decodes alone"
    assert max(call.args[2] for call in of_drafting.call_args_list) == 3, "the most drafts of a row"
    assert sum(call.args[0] for call in of_limiter.call_args_list) == 5 + num_drafts
    assert h.engine.stats().iteration_tokens.total == num_tokens
