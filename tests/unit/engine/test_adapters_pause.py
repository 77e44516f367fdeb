"""Requests that pause, so that a first token of another adapter does not wait for the end of their answers."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, request
from fake_tiers import TierPlan
from test_adapters_engine import step_until, with_adapters
from test_engine_outputs import MODES

from tandem.workers.engine.adapters.adapter_cache import SLICE_S, AdapterCache
from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.sequence import SequenceStatus
from tandem.workers.messages.request import Abort, AdapterRef, GenerationRequest

SLICE = int(SLICE_S / 0.01)
"""Steps of the fake clock."""


def four_long_answers(h: Harness, **options: object) -> list[GenerationRequest]:
    """Requests that hold all four places of the device, each for many slices."""
    requests = [request(name, 5, 400, adapter=name, **options) for name in "abcd"]
    h.add(*requests)
    for req in requests:
        step_until(h, req.request_id, SequenceStatus.RUNNING)
    return requests


def steps_to_first_token(h: Harness, name: str, most: int = 3 * SLICE) -> int:
    for step in range(most):
        if (name, 0) in h.sink.tokens:
            return step
        h.step()
    return most


def computed(h: Harness) -> int:
    return sum(work.num_tokens for plan in h.executor.plans for work in plan.work)


@pytest.mark.parametrize("options", [{}, {"num_ranks": 2}, {"tiers": TierPlan(host_slots=64)}, {"caching": False}])
@pytest.mark.parametrize("mode", MODES)
def test_a_first_token_comes_within_a_slice_and_nothing_is_computed_again(mode, options):
    h = with_adapters(**mode, **options, num_blocks=600)
    requests = four_long_answers(h)
    requests.append(request("new", 5, 4, adapter="e"))
    h.add(requests[-1])
    assert steps_to_first_token(h, "new") <= SLICE + 20
    assert 1 <= h.engine.stats().preemptions <= 3
    h.run()
    assert_as_expected(h, *requests)
    if "drafts" not in mode:
        assert computed(h) <= sum(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)


def test_those_that_pause_come_back_in_turns():
    """Five long answers on four places: each has about four fifths of the steps."""
    h = with_adapters(num_blocks=900)
    h.add(*(requests := [request(name, 5, 450, adapter=name) for name in "abcde"]))
    for _ in range(10 * SLICE):
        h.step()
    tokens = {name: len(h.sink.tokens[name, 0]) for name in "abcde"}
    assert min(tokens.values()) > 0.6 * max(tokens.values()), tokens
    h.run()
    assert_as_expected(h, *requests)


def test_first_tokens_go_before_those_that_pause_but_not_for_long():
    """Each of many short requests needs an adapter of its own, one at a time."""
    h = with_adapters(num_blocks=900, max_cpu_loras=64)
    requests = [request(name, 5, 450, adapter=name) for name in "abcd"]
    h.add(*requests)
    for name in "abcd":
        step_until(h, name, SequenceStatus.RUNNING)
    for _ in range(SLICE):
        h.step()
    waits, quiet, longest = [], dict.fromkeys("abcd", 0), 0
    for step in range(24 * SLICE):
        if step % (2 * SLICE) == 0:
            requests.append(request(f"{step}", 5, 8, adapter=f"x{step}"))
            h.add(requests[-1])
        before = {name: len(h.sink.tokens[name, 0]) for name in "abcd"}
        h.step()
        if len(waits) <= step // (2 * SLICE) and (requests[-1].request_id, 0) in h.sink.tokens:
            waits.append(step % (2 * SLICE))
        for name, count in before.items():
            has_gone_on = len(h.sink.tokens[name, 0]) > count or name in h.sink.ends
            quiet[name] = 0 if has_gone_on else quiet[name] + 1
        longest = max(longest, *quiet.values())
    assert len(waits) == 12 and max(waits) <= 15, waits
    assert 10 < longest <= 1.5 * SLICE, "it goes on when a short answer has ended, or after a slice"
    h.run()
    assert_as_expected(h, *requests)


def test_who_pauses_is_not_charged_for_its_adapter_again():
    h = with_adapters(num_blocks=600)
    four_long_answers(h)
    h.engine.drain_charges()
    tokens = sum(len(h.sink.tokens[name, 0]) for name in "abcd")
    h.add(request("new", 5, 200, adapter="e"))
    for _ in range(4 * SLICE):
        h.step()
    assert h.engine.stats().adapters.loads > 6, "some have come back"
    tokens = sum(map(len, h.sink.tokens.values())) - tokens
    assert abs(h.engine.drain_charges()["default"] - (5 + 256 + 2 * tokens)) <= 40
    h.run()


def test_in_a_long_line_nobody_pauses():
    h = with_adapters(num_blocks=600)
    requests = [*four_long_answers(h), *(request(f"{i}", 5, 4, adapter=f"x{i}") for i in range(5))]
    h.add(*requests[4:])
    assert steps_to_first_token(h, "0") == 3 * SLICE
    assert h.engine.stats().preemptions == 0
    h.run()
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("options", [{"n": 2}, {"priority": -1}], ids=["shared blocks", "more urgent"])
def test_who_shares_blocks_or_is_more_urgent_does_not_pause(options):
    h = with_adapters(num_blocks=600, max_num_seqs=12)
    four_long_answers(h, **options)
    h.add(request("new", 5, 4, adapter="e"))
    assert steps_to_first_token(h, "new") == 3 * SLICE
    assert h.engine.stats().preemptions == 0
    h.run()


def test_a_tenant_that_was_served_less_does_not_pause():
    h = with_adapters(num_blocks=600)
    h.engine.set_weights({"calm": 1000.0})
    four_long_answers(h, tenant="calm")
    h.add(request("base", 5, 60, tenant="loud"))
    while "base" not in h.sink.ends:
        h.step()
    h.add(request("new", 5, 4, adapter="e", tenant="loud"))
    assert steps_to_first_token(h, "new") == 3 * SLICE
    h.run()


@pytest.mark.parametrize(("num_blocks", "pauses"), [(121, False), (600, True)])
def test_without_room_to_keep_what_they_have_computed_nobody_pauses(num_blocks, pauses):
    """Four short answers and a long prompt fill 119 blocks, 114 when the first slice is over."""
    h = with_adapters(num_blocks=num_blocks)
    h.add(request("base", 300, 36), *(request(name, 5, 31, adapter=name) for name in "abcd"))
    for name in "abcd":
        step_until(h, name, SequenceStatus.RUNNING)
    h.add(request("new", 5, 4, adapter="e"))
    kept = 0
    while h.engine.has_work():
        h.step()
        kept += len(h.engine.scheduler.rows.kept_tables())
    assert (kept > 0) == pauses


@pytest.mark.parametrize("how", ["abort", "end"])
def test_who_ends_while_it_pauses_leaves_nothing(how):
    h = with_adapters(num_blocks=600)
    requests = four_long_answers(h)
    h.add(request("new", 5, 200, adapter="e"))
    steps_to_first_token(h, "new")
    paused = [req.request_id for req in requests if h.states(req.request_id) == [Blocker.ADAPTER]]
    assert paused and len(h.engine.scheduler.rows.kept_tables()) == len(paused)
    if how == "abort":
        for name in paused:
            h.engine.abort(Abort(request_id=name, attempt=0))
        assert h.engine.scheduler.rows.kept_tables() == []
    h.run()


@pytest.mark.parametrize("tiers", [None, TierPlan(host_slots=64)], ids=["", "tiers"])
def test_kv_of_a_row_that_fails_while_it_pauses_is_found_no_more(tiers):
    """Its last sample was in flight when it lost its row, and is an error."""

    def until_it_pauses(*fails_at: tuple[int, int, int]) -> Harness:
        h = with_adapters(num_blocks=600, num_pages=2, asynchronous=True, tiers=tiers, fail_at=frozenset(fails_at))
        h.add(bad)
        step_until(h, "bad", SequenceStatus.RUNNING)
        h.add(request("new", 5, 4, adapter="e"))
        while "bad" not in h.sink.ends and h.states("bad") != [Blocker.ADAPTER]:
            h.step()
        return h

    bad = request("bad", 20, 200, adapter="x")
    place = len(until_it_pauses().sink.tokens["bad", 0])
    h = until_it_pauses((bad.sampling.seed, 0, place - 1))
    h.run()
    assert h.sink.ends["bad"].finish_reasons == ["error"]
    h.add(again := request("again", bad.prompt_token_ids, 4, adapter="x"))
    h.run()
    assert h.sink.begun["again"] == 0, "nothing of it is in the cache"
    assert_as_expected(h, again)


# ---- nobody pauses in vain ----


def test_one_that_cannot_pause_is_not_in_the_way_of_those_that_can():
    """The answer that has been there for longest shares its blocks."""
    h = with_adapters(num_blocks=600, max_num_seqs=12)
    requests = [request(name, 5, 200, adapter=name, n=1 + (name == "a")) for name in "abcd"]
    for req in requests:
        h.add(req)
        step_until(h, req.request_id, SequenceStatus.RUNNING)
    requests.append(request("new", 5, 4, adapter="e"))
    h.add(requests[-1])
    assert steps_to_first_token(h, "new") <= SLICE + 20
    h.run()
    assert_as_expected(h, *requests)


def pages_of(digest: str, rank: int) -> int:
    return {"small": 1, "large": 4}.get(digest, 3)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_nobody_pauses_for_an_adapter_that_would_find_no_room_all_the_same(is_pinned):
    """Four pages, of which a pinned adapter keeps three. Without the pin both pause at once."""
    h = with_adapters(num_blocks=600, num_pages=4, pages=pages_of)
    if is_pinned:
        h.engine.set_pinned_adapters([AdapterRef(name="three", digest="three", source="three")])
    requests = [request(name, 5, 100, adapter=name) for name in ("three", "small")]
    for req in requests:
        h.add(req)
        step_until(h, req.request_id, SequenceStatus.RUNNING)
    h.add(request("large", 5, 4, adapter="large"))
    assert (steps_to_first_token(h, "large") < SLICE + 5) == (not is_pinned)
    assert h.engine.stats().preemptions == (0 if is_pinned else 2)
    h.run()
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_those_of_a_batch_do_not_pause_for_one_that_may_not_join_it(policy):
    h = with_adapters(num_blocks=600, num_pages=2, batching_policy=policy)
    requests = [request("x", 5, 80, adapter="x"), request("new", 5, 4, adapter="e")]
    h.add(requests[0])
    step_until(h, "x", SequenceStatus.RUNNING)
    h.step()
    h.add(requests[1])
    while "x" not in h.sink.ends:
        h.step()
    assert h.engine.stats().preemptions == 0
    h.run()
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("is_before", [True, False])
def test_nobody_pauses_for_one_that_waits_for_a_row_behind_others(is_before):
    """All rows are taken, and others wait for one: the place on the device is not what is lacking."""
    h = with_adapters(num_blocks=600, max_num_seqs=4)
    requests = four_long_answers(h)
    new, others = request("new", 5, 4, adapter="e"), [request(f"base{i}", 5, 80) for i in range(9)]
    requests += [new, *others] if is_before else [*others, new]
    h.add(*requests[4:])
    for _ in range(4 * SLICE):
        h.step()
    assert (h.engine.stats().preemptions > 0) == is_before
    h.run()
    assert_as_expected(h, *requests)


def test_who_comes_back_has_a_slice_from_its_row_on():
    """Its adapter is on the device again long before a row is free, and another one is waited for."""
    h = with_adapters(num_blocks=600, num_pages=2, max_num_seqs=1)
    requests = [request("x", 5, 200, adapter="x"), request("short", 5, 4, adapter="s")]
    h.add(requests[0])
    step_until(h, "x", SequenceStatus.RUNNING)
    h.add(requests[1])
    steps_to_first_token(h, "short")
    requests.append(request("base", 5, 2 * SLICE))
    h.add(requests[-1])
    step_until(h, "base", SequenceStatus.RUNNING)
    step_until(h, "x", SequenceStatus.WAITING)
    requests.append(request("new", 5, 4, adapter="e"))
    h.add(requests[-1])
    step_until(h, "x", SequenceStatus.RUNNING)
    before = len(h.sink.tokens["x", 0])
    step_until(h, "new", SequenceStatus.RUNNING)
    assert len(h.sink.tokens["x", 0]) - before >= SLICE
    h.run()
    assert_as_expected(h, *requests)


def steps_for_six(slice_s: float) -> int:
    """Steps of a tenth of a second for six long answers over four places."""

    class Sliced(AdapterCache):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{**named, "slice_s": slice_s})

    h = with_adapters(num_blocks=600, asynchronous=True, delay=lambda move, rank: 1, adapter_cache=Sliced)
    h.step_s = 0.1
    h.add(*(requests := [request(name, 5, 100, adapter=name) for name in "abcdef"]))
    steps = 0
    while h.engine.has_work():
        h.step()
        steps += 1
    h.run()
    assert_as_expected(h, *requests)
    return steps


def test_where_steps_are_slow_adapters_do_not_come_and_go_all_the_time():
    """Three steps would be a slice, of which coming and going takes as many."""
    assert steps_for_six(SLICE_S) <= 1.1 * steps_for_six(float("inf"))


def test_who_pauses_keeps_what_its_tenant_is_owed():
    """Its tenant was served less than one that waits, and runs nothing else."""
    h = with_adapters(num_blocks=900, num_pages=2, max_num_seqs=4, max_num_batched_tokens=4096)
    h.add(request("g", 5, 300, tenant="calm"), request("x", 5, 300, adapter="x", tenant="owed"))
    h.add(*(request(f"q{i}", 400, 60, tenant="loud") for i in range(9)))
    step_until(h, "x", SequenceStatus.RUNNING)
    for _ in range(SLICE + 5):
        h.step()
    h.add(request("new", 5, 4, adapter="e", tenant="calm"))
    step_until(h, "x", Blocker.ADAPTER)
    state = h.engine.requests.get("x")
    assert state is not None
    counter = h.engine.scheduler.waiting.tenants.counter(state.sequences[0])
    charges = h.engine.drain_charges()
    assert charges["loud"] > 1000 and counter == charges["owed"] < 400
    h.run()
