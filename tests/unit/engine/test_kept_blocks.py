"""Sequences that gave a row to another tenant go on where they were, as long as nobody needs their blocks."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, harness, request
from fake_tiers import TierPlan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_outputs import MODES

from tandem.workers.engine.base.sequence import SequenceStatus
from tandem.workers.messages.request import Abort, GenerationRequest

ROWS = 4


def engine(mode: dict[str, Any], **more: Any) -> Harness:
    return harness(**{"num_blocks": 200, "max_num_seqs": ROWS, "max_num_batched_tokens": 64, **mode, **more})


def computed(h: Harness) -> int:
    return sum(work.num_tokens for plan in h.executor.plans for work in plan.work)


def a_row_taken(h: Harness) -> list[GenerationRequest]:
    """Long answers in all rows, then one of another tenant."""
    requests = [request(f"loud{i}", 9, 60, tenant="loud") for i in range(ROWS)]
    h.add(*requests)
    for _ in range(9):
        h.step()
    requests.append(request("quiet", 9, 4, tenant="quiet"))
    h.add(requests[-1])
    h.step()
    assert h.engine.stats().preemptions == 1
    return requests


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_computed_again(mode: dict[str, Any], caching: bool) -> None:
    h = engine(mode, caching=caching)
    requests = a_row_taken(h)
    assert len(h.engine.scheduler.rows.kept_tables()) == 1
    h.run()
    assert_as_expected(h, *requests)
    if "drafts" not in mode:
        assert computed(h) <= sum(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)


def test_who_needs_the_room_has_it() -> None:
    """The others grow until the pool is full: what is kept goes before any of them is preempted."""
    h = engine({}, num_blocks=76)
    requests = [request(f"loud{i}", 9, 60, tenant="loud") for i in range(ROWS)]
    h.add(*requests)
    for _ in range(20):
        h.step()
    requests.append(request("quiet", 9, 60, tenant="quiet"))
    h.add(requests[-1])
    h.run()
    assert h.engine.stats().preemptions == 1
    assert_as_expected(h, *requests)


def test_what_a_request_left_is_released_when_it_ends_in_the_queue() -> None:
    h = engine({})
    requests = a_row_taken(h)
    [waits] = [r for r in requests if h.states(r.request_id) == [SequenceStatus.WAITING]]
    used = h.engine.stats().used_blocks
    h.engine.abort(Abort(request_id=waits.request_id, attempt=waits.attempt))
    assert h.engine.scheduler.rows.kept_tables() == []
    assert h.engine.stats().used_blocks < used
    h.run()


def test_after_a_step_without_memory_all_is_computed_again() -> None:
    h = engine({"asynchronous": True}, room=lambda step_id: 3 if step_id in (12, 13) else 99)
    requests = a_row_taken(h)
    h.run()
    assert_as_expected(h, *requests)


ROOMS = [
    {},
    {"caching": False},
    {"windows": (8, None)},
    {"tiers": TierPlan()},
    {"num_blocks": 44},
    {"num_blocks": 44, "tiers": TierPlan()},
    {"num_blocks": 60, "windows": (8, None)},
    {"room": lambda step_id: 3 if step_id % 17 == 0 else 99},
]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(draw=st.data())
def test_answers_of_tenants_that_take_rows_from_each_other_are_as_alone(mode: dict[str, Any], draw: Any) -> None:
    room = draw.draw(st.sampled_from(ROOMS))
    if "stages" in mode and "tiers" in room:
        room = {}
    h = engine(mode, **room)
    h.engine.set_weights({"b": draw.draw(st.sampled_from([0.5, 1.0, 3.0]))})
    requests: list[GenerationRequest] = []
    for number in range(draw.draw(st.integers(4, 24))):
        tenant = draw.draw(st.sampled_from("aaabc"))
        n = 1 if draw.draw(st.integers(0, 5)) else 3
        prompt, tokens = draw.draw(st.integers(1, 30)), draw.draw(st.integers(1, 40))
        requests.append(request(f"{tenant}{number}", prompt, tokens, tenant=tenant, n=n))
        h.add(requests[-1])
        for _ in range(draw.draw(st.integers(0, 6))):
            h.step()
    h.run()
    assert h.engine.scheduler.rows.kept_tables() == []
    assert_as_expected(h, *requests)
