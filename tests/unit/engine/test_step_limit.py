"""The device runs out of memory in a step: fewer tokens at once, the same answers, and only what never fits ends."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, harness, request
from fake_tiers import TierPlan
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.engine.base.step_limit import GOOD_STEPS, StepLimit
from tandem.workers.messages.request import Abort


def seven(h: Harness) -> list[Any]:
    requests = [request(f"r{i}", 5 + 3 * i, 9, n=1 + i % 2, temperature=1.0) for i in range(7)]
    h.add(*requests)
    return requests


@pytest.mark.parametrize(("asynchronous", "stages"), [(False, 1), (True, 1), (False, 3)])
def test_a_chunk_is_halved_until_it_fits_and_every_answer_is_whole(asynchronous: bool, stages: int) -> None:
    """At first 32 tokens a step, then room for 5."""
    h = harness(asynchronous=asynchronous, stages=stages, room=lambda step_id: 5)
    requests = seven(h)
    h.run()
    assert_as_expected(h, *requests)
    assert h.executor.failures and h.engine.stats().wasted_tokens == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decodes_that_do_not_fit_together_take_turns(asynchronous: bool) -> None:
    h = harness(asynchronous=asynchronous, room=lambda step_id: 3 if step_id > 6 else 99)
    requests = seven(h)
    h.run()
    assert_as_expected(h, *requests)
    assert len(h.executor.failures) > 1


def test_nobody_waits_for_long_while_not_all_fit() -> None:
    """Eight rows, room for four tokens: each comes in every other step or so."""
    h = harness(room=lambda step_id: 4 if step_id > 3 else 99, num_blocks=200)
    h.add(*(request(f"r{i}", 3, 60) for i in range(8)))
    served: dict[int, int] = {}
    longest = 0
    while h.engine.has_work():
        h.step()
        for plan in h.executor.plans[-1:]:
            for work in plan.work:
                longest = max(longest, plan.step_id - served.get(work.row, plan.step_id))
                served[work.row] = plan.step_id
    assert longest < 15, "failed steps on the way included"


def test_what_is_alone_in_a_step_and_still_too_large_ends_with_an_error_and_the_next_is_served() -> None:
    h = harness(room=lambda step_id: 0 if step_id <= 6 else 99, max_num_seqs=1)
    h.add(request("late", 4, 3, priority=1), request("large", 40, 3))
    h.run()
    ended = h.sink.ends["large"]
    assert ended.finish_reasons == ["error"] and h.sink.batches[0][0].error == "out of memory"
    assert h.sink.ends["late"].finish_reasons == ["length"]


def test_the_limit_goes_when_steps_are_good_again() -> None:
    limit = StepLimit(100)
    limit.failed(80)
    assert (limit.tokens, limit.is_reduced) == (40, True)
    limit.failed(90)
    assert limit.tokens == 20, "half of the smaller"
    for _ in range(3 * GOOD_STEPS):
        limit.succeeded()
    assert (limit.tokens, limit.is_reduced) == (100, False)
    limit.failed(1)
    assert limit.tokens == 1


def test_an_engine_has_whole_steps_again_after_some_that_were_good() -> None:
    h = harness(room=lambda step_id: 5 if step_id < 4 else 99, num_blocks=200)
    h.add(request("a", 20, 8 * GOOD_STEPS))
    for _ in range(6 * GOOD_STEPS):
        h.step()
    h.add(request("b", 60, 2))
    h.step()
    assert sum(work.num_tokens for work in h.executor.plans[-1].work) == 32
    h.run()


@settings(max_examples=100)
@given(
    failing=st.sets(st.integers(1, 60), max_size=25),
    room=st.integers(1, 20),
    asynchronous=st.booleans(),
    shape=st.sampled_from([{"stages": 1}, {"stages": 2}, {"stages": 3}, {"drafts": 4}, {"stages": 2, "drafts": 4}]),
    num_blocks=st.sampled_from([12, 20, 64]),
    host_slots=st.sampled_from([0, 30]),
    aborted=st.integers(0, 12),
)
def test_any_steps_may_run_out_of_memory(
    failing: set[int],
    room: int,
    asynchronous: bool,
    shape: dict[str, int],
    num_blocks: int,
    host_slots: int,
    aborted: int,
) -> None:
    """With preemptions, shared prompts, prefix hits, loads from the host; one request is aborted on the way."""
    h = harness(
        asynchronous=asynchronous,
        **shape,
        num_blocks=num_blocks,
        room=lambda step_id: room if step_id in failing else 99,
        tiers=TierPlan(host_slots=host_slots) if host_slots else None,
        patience=50,
    )
    requests = seven(h)
    for _ in range(aborted):
        h.step()
    h.engine.abort(Abort(request_id="r3", attempt=0))
    h.run()
    assert_as_expected(h, *(r for r in requests if r.request_id != "r3"))
