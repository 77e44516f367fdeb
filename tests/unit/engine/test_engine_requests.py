"""Refusals, aborts, deadlines, resumption, errors: every accepted request has one end and leaves nothing behind."""

import itertools
from unittest import mock

import pytest
from builders import EOS, Harness, assert_as_expected, expected, harness, request
from fake_adapters import AdapterPlan
from fake_tiers import TierPlan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_outputs import MODES, ONE_TOKEN_MODES

from tandem.workers.messages.errors import ContextLengthExceeded, QueueFull, RequestRefused
from tandem.workers.messages.request import Abort
from tests.support.engine_invariants import check_invariants


def finish_one(h: Harness, name: str = "z") -> None:
    """Liveness: the engine still serves a known request with the known tokens."""
    req = request(name, 5, 4)
    h.add(req)
    h.run()
    assert_as_expected(h, req)


# ---- refusals ----


def test_a_prompt_beyond_the_context_is_refused_with_the_number_that_fits():
    h = harness(max_model_len=20)
    with pytest.raises(ContextLengthExceeded, match="at most 19 would fit") as refused:
        h.add(request("a", 20))
    assert refused.value.param == "prompt"
    h.add(request("b", 19, 5))
    h.run()
    assert h.sink.ends["b"].positions == [1] and h.sink.ends["b"].finish_reasons == ["length"]


def test_a_prompt_beyond_the_pool_is_refused_with_the_number_that_fits():
    h = harness(num_blocks=4, block_size=4)
    with pytest.raises(ContextLengthExceeded, match="at most 16 would fit"):
        h.add(request("a", 17))
    finish_one(h)


def test_growing_beyond_the_whole_pool_ends_with_length():
    h = harness(num_blocks=4, block_size=4)
    req = request("a", 5, 100)
    h.add(req)
    h.run()
    assert_as_expected(h, req)
    assert h.sink.ends["a"].positions == [12]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [97]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"resume": [[1], [2]]}, "n"),
        ({"adapter": "digest"}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, param):
    h = harness()
    with pytest.raises(RequestRefused) as refusal:
        h.add(request("a", **{"prompt": 3, **changes}))
    assert refusal.value.param == param
    assert not h.engine.has_work() and h.engine.stats().rejected["invalid"] == 1
    finish_one(h)


def test_the_queue_has_limits_of_requests_and_of_tokens():
    h = harness(max_num_queued_reqs=2)
    h.add(request("a", 3), request("b", 3))
    with pytest.raises(QueueFull):
        h.add(request("c", 3))
    h.step()
    h.add(request("d", 3))
    h.run()
    assert set(h.sink.ends) == {"a", "b", "d"} and h.engine.stats().rejected["queue_full"] == 1

    h = harness(max_num_queued_tokens=10)
    h.add(request("a", 11))
    with pytest.raises(QueueFull):
        h.add(request("b", 1))
    h.run()


@pytest.mark.parametrize(
    ("limits", "taken"),
    [({"max_num_queued_reqs": 4}, [4, 2, 0, 2, 0, 0]), ({"max_num_queued_tokens": 12}, [4, 2, 0, 1, 1, 0])],
)
def test_a_full_queue_still_takes_each_tenants_part(limits, taken):
    """4 requests of 3 tokens may wait: with two tenants 2 of each, with three 2 (or 4 tokens); never more than 8."""
    h, numbers = harness(**limits), itertools.count()

    def fill(tenant: str) -> int:
        for count in itertools.count():
            try:
                h.add(request(f"{tenant}{next(numbers)}", 3, tenant=tenant))
            except QueueFull:
                return count
        raise AssertionError

    assert [fill(tenant) for tenant in ("loud", "quiet", "loud", "third", "fourth", "fifth")] == taken
    h.run()
    assert fill("loud") == 4, "nothing is left of what has gone"
    h.run()


def test_a_tenants_first_prompt_may_be_longer_than_its_part():
    h = harness(max_num_queued_tokens=20)
    h.add(*(request(f"a{i}", 5, tenant="loud") for i in range(4)))
    h.add(request("b", 15, tenant="quiet"))
    with pytest.raises(QueueFull):
        h.add(request("c", 6, tenant="third"))
    h.run()


def test_one_id_runs_once_and_a_newer_attempt_replaces_it():
    h = harness()
    h.add(request("a", 3, 50))
    with pytest.raises(RequestRefused, match="already running"):
        h.add(request("a", 3))
    h.step()
    h.engine.add_request(request("a", 3, 2, attempt=1))
    assert h.sink.ends.pop("a").finish_reasons == ["abort"]
    h.sink.tokens.clear()
    h.run()
    assert h.sink.ends["a"].attempt == 1


def test_a_newer_attempt_replaces_one_that_was_complete_when_resumed():
    h = harness()
    h.add(request("a", 3, 2, resume=[[5, 6]]))
    h.engine.add_request(request("a", 3, 2, attempt=1))
    assert h.sink.ends.pop("a").attempt == 0
    h.sink.resumed.clear()
    h.run()
    assert h.sink.ends["a"].attempt == 1


def test_a_request_that_ends_while_it_waits_leaves_its_place_in_the_queue():
    h = harness(max_num_queued_reqs=1)
    h.add(request("a", 3))
    h.engine.abort(Abort(request_id="a", attempt=0))
    h.add(request("b", 3))
    h.run()


def failing(owner: object, name: str, *, before: bool) -> object:
    """A method that raises, before or after it has done its work."""
    method = getattr(owner, name)

    def fail(*args: object, **kwargs: object) -> object:
        if not before:
            method(*args, **kwargs)
        raise TypeError("'<' not supported")

    return mock.patch.object(owner, name, fail)


PLACES = {
    "deadlines": lambda h: (h.engine.requests._deadlines, "add"),
    "adapter": lambda h: (h.engine.adapters, "before_queue"),
    "admission": lambda h: (h.engine.scheduler.admission, "enqueue"),
    "tiers": lambda h: (h.engine.offload, "load"),
    "push": lambda h: (h.engine.scheduler.waiting, "push"),
    "order": lambda h: (h.engine.scheduler.waiting.tenants, "push"),
    "forks": lambda h: (h.engine.scheduler.waiting, "block"),
}


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("place", "n"), [*itertools.product(PLACES, [2]), *((place, 1) for place in PLACES if place != "forks")]
)
def test_a_request_that_fails_on_its_way_to_the_queue_leaves_nothing(place, n, before):
    h = harness(adapters=AdapterPlan(), tiers=TierPlan(), num_blocks=200, max_num_queued_reqs=2, patience=400)
    other = request("other", 6, 20, adapter="a")
    h.add(other)
    while "other" not in h.sink.begun:
        h.step()
    has_adapter = place in ("adapter", "admission")
    bad = request("bad", 6, 4, n=n, adapter="a" if has_adapter else None, deadline_s=0.001)
    with failing(*PLACES[place](h), before=before):
        with pytest.raises(TypeError):
            h.engine.add_request(bad)
    check_invariants(h.engine)
    assert not h.engine.requests._limits.num_requests and not h.engine.requests._limits.num_tokens
    users = {state.request.request_id for known in h.engine.adapters._known for state in known.users}
    assert users == {"other"}
    h.step()
    assert h.engine.stats().waiting == 0 and "bad" not in h.sink.ends
    again = request("bad", 6, 4, n=n)
    h.add(again)
    h.run()
    assert_as_expected(h, other, again)


def test_a_request_that_fails_when_it_is_queued_uses_no_grammar():
    h = harness(patience=100)
    with failing(h.engine.scheduler.admission, "enqueue", before=True), pytest.raises(TypeError):
        h.engine.add_request(request("bad", 6, grammar="g"))
    assert not any(known.users for known in h.engine.grammars._known.values())
    finish_one(h)


# ---- aborts ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", range(7))
def test_an_abort_at_any_moment_releases_everything(mode, steps):
    h = harness(**mode)
    h.add(request("a", 50, 20, n=2), request("b", 7, 9))
    for _ in range(steps):
        h.step()
    h.engine.abort(Abort(request_id="a", attempt=0))
    ended = h.sink.ends["a"]
    assert ended.finish_reasons == ["abort", "abort"]
    assert ended.positions == [len(h.sink.tokens.get(("a", i), [])) for i in range(2)]
    assert ended.usage.prompt_tokens == (50 if steps else 0), "from its first row on"
    h.engine.abort(Abort(request_id="a", attempt=0))
    h.engine.abort(Abort(request_id="unknown", attempt=0))
    h.run()
    assert_as_expected(h, request("b", 7, 9))


def test_an_abort_of_what_was_complete_when_resumed_comes_too_late():
    h = harness()
    h.add(request("a", 3, 2, resume=[[5, 6]]))
    h.engine.abort(Abort(request_id="a", attempt=0))
    assert not h.sink.ends
    h.run()
    assert h.sink.reasons["a", 0] == "length" and h.sink.ends["a"].finish_reasons == ["length"]


def test_an_abort_of_another_attempt_is_ignored():
    h = harness()
    h.add(request("a", 3, 4, attempt=2))
    h.step()
    h.engine.abort(Abort(request_id="a", attempt=1))
    h.run()
    assert h.sink.ends["a"].finish_reasons == ["length"]


@pytest.mark.parametrize("mode", MODES)
def test_keep_positions_trims_the_bill_and_reads_as_stop(mode):
    h = harness(**mode)
    h.add(request("a", 3, 40))
    while len(h.sink.tokens.get(("a", 0), [])) < 6:
        h.step()
    produced = len(h.sink.tokens["a", 0])
    h.engine.abort(Abort(request_id="a", attempt=0, keep_positions=4))
    ended = h.sink.ends["a"]
    assert (ended.positions, ended.finish_reasons, ended.usage.completion_tokens) == ([4], ["stop"], 4)
    assert h.engine.stats().wasted_tokens == produced - 4, "those of steps in flight come later"
    h.run()
    assert h.engine.stats().wasted_tokens >= produced - 4


def test_no_more_is_billed_than_there_is_and_a_choice_that_keeps_all_keeps_its_reason():
    h = harness()
    h.add(request("a", 3, 4, n=2, resume=[[5, 6, 7], []]))
    while ("a", 0) not in h.sink.reasons:
        h.step()
    h.engine.abort(Abort(request_id="a", attempt=0, choice=0, keep_positions=4))
    h.engine.abort(Abort(request_id="a", attempt=0, choice=1, keep_positions=9))
    ended = h.sink.ends["a"]
    assert ended.finish_reasons == ["length", "stop"]
    assert ended.positions == [4, len(h.sink.tokens.get(("a", 1), []))]
    assert h.engine.stats().wasted_tokens == 0


@pytest.mark.parametrize("mode", ONE_TOKEN_MODES)
@pytest.mark.parametrize("choice", [0, 1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_one_choice_is_aborted_and_the_others_go_on(mode, choice, steps):
    h = harness(**mode, num_blocks=100)
    req = request("a", 40, 12, n=3)
    h.add(req)
    for _ in range(steps):
        h.step()
    h.engine.abort(Abort(request_id="a", attempt=0, choice=choice))
    assert "a" not in h.sink.ends
    h.run()
    for other in {0, 1, 2} - {choice}:
        assert h.sink.tokens["a", other] == expected(req, other, 512)[0]
    assert h.sink.ends["a"].finish_reasons[choice] == "abort"


def test_a_stop_string_found_after_a_choice_ended_still_trims_it():
    h = harness()
    h.add(request("a", 3, 30, n=2, stop_token_ids=tuple(range(2, 50))))
    while not h.sink.reasons:
        h.step()
    ((_, choice),) = list(h.sink.reasons)[:1]
    h.engine.abort(Abort(request_id="a", attempt=0, choice=choice, keep_positions=0))
    h.engine.abort(Abort(request_id="a", attempt=0, choice=1 - choice))
    assert h.sink.ends["a"].positions[choice] == 0
    assert h.sink.ends["a"].finish_reasons[choice] == "stop"
    h.run()


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_aborts_leave_nothing_and_disturb_nobody(mode, data):
    draw = data.draw
    h = harness(**mode, num_blocks=draw(st.integers(14, 40)), stalls=draw(st.integers(0, 1)))
    requests = [
        request(f"r{i}", draw(st.integers(1, 40)), draw(st.integers(1, 15)), n=draw(st.sampled_from([1, 1, 3])))
        for i in range(8)
    ]
    h.add(*requests)
    while h.engine.has_work():
        h.step()
        if draw(st.integers(0, 5)) == 0:
            victim = draw(st.sampled_from(requests))
            h.engine.abort(
                Abort(
                    request_id=victim.request_id,
                    attempt=0,
                    choice=draw(st.sampled_from([None, None, 0, 1])),
                    keep_positions=draw(st.sampled_from([None, None, 2])),
                )
            )
            check_invariants(h.engine)
    h.assert_empty()
    for req in requests:
        ended = h.sink.ends[req.request_id]
        for choice in range(req.sampling.n):
            want, reason = expected(req, choice, min(512, h.executor.num_blocks * 4 + 1))
            got = h.sink.tokens.get((req.request_id, choice), [])
            if ended.finish_reasons[choice] == reason:
                assert got == want
            else:
                assert ended.finish_reasons[choice] in ("abort", "stop") and got == want[: len(got)]


# ---- deadlines ----


def test_a_request_that_waits_past_its_deadline_is_refused():
    h = harness(max_num_seqs=1)
    h.add(request("a", 3, 30), request("late", 3, 5, deadline_s=0.1), request("fine", 3, 5, deadline_s=10.0))
    h.run()
    ended = h.sink.ends["late"]
    assert ended.refused is not None and ended.refused[:2] == (503, "service_unavailable")
    assert ended.positions == [0] and ended.usage.completion_tokens == 0
    assert h.sink.ends["fine"].refused is None
    assert h.engine.stats().rejected["deadline"] == 1


def test_a_deadline_counts_waiting_only():
    h = harness()
    h.add(request("a", 3, 50, deadline_s=0.02))
    h.run()
    assert h.sink.ends["a"].positions == [50]


# ---- resumption and errors ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_resumed_request_goes_on_where_it_was_cut(mode, cut):
    whole = request("a", 9, 12, n=2)
    full = [expected(whole, choice, 512)[0] for choice in range(2)]
    h = harness(**mode)
    resumed = request("a", 9, 12, n=2, resume=[tokens[:cut] for tokens in full], attempt=1)
    h.add(resumed)
    h.run()
    assert [h.sink.tokens["a", choice] for choice in range(2)] == [tokens[cut:] for tokens in full]
    ended = h.sink.ends["a"]
    assert ended.positions == [12, 12]
    assert (ended.usage.prompt_tokens, ended.usage.completion_tokens) == (9, 24)


@pytest.mark.parametrize("mode", MODES)
def test_choices_that_were_complete_when_resumed_end_at_once(mode):
    h = harness(**mode)
    h.add(request("a", 3, 4, n=3, ignore_eos=False, resume=[[5, EOS], [5, 6, 7, 8], []]))
    h.run()
    assert h.sink.reasons["a", 0] == "stop" and h.sink.reasons["a", 1] == "length"
    assert h.sink.ends["a"].positions[:2] == [2, 4]
    assert h.engine.stats().finished["stop"] >= 1 and sum(h.engine.stats().finished.values()) == 3
    h.add(request("b", 3, 2, resume=[[5, 6]]))
    assert h.engine.has_work()
    h.run()
    assert h.sink.ends["b"].positions == [2]


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_a_row_ends_only_its_request(mode):
    bad = request("bad", 6, 20, n=2)
    others = [request(f"o{i}", 5 + i, 15) for i in range(4)]
    h = harness(**mode, fail_at=frozenset({(bad.sampling.seed, 1, 3)}))
    h.add(bad, *others)
    h.run()
    assert h.sink.ends["bad"].finish_reasons == ["error", "error"]
    assert any(d.error == "logits are not finite" for batch in h.sink.batches for d in batch)
    assert_as_expected(h, *others)
    assert h.engine.stats().finished["error"] == 2
    finish_one(h)


def test_blocks_of_a_failed_request_are_found_no_more():
    bad = request("bad", 24, 20)
    h = harness(fail_at=frozenset({(bad.sampling.seed, 0, 3)}))
    h.add(bad)
    h.run()
    h.add(request("again", bad.prompt_token_ids, 2))
    h.run()
    assert h.sink.ends["again"].usage.cached_tokens == 0


# ---- usage and prefix cache ----


@pytest.mark.parametrize("mode", MODES)
def test_a_second_turn_finds_the_first_in_the_cache(mode):
    h = harness(**mode)
    first = request("a", 10, 7)
    h.add(first)
    h.run()
    history = first.prompt_token_ids + h.sink.tokens["a", 0]
    second = request("b", [*history, 5, 6], 4)
    h.add(second)
    h.run()
    assert_as_expected(h, second)
    assert h.sink.ends["b"].usage.cached_tokens == 16
    stats = h.engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10 + 19, 16)


def test_another_salt_finds_nothing():
    one, two = request("a", 16, 2, salt="s1"), request("b", 16, 2, salt="s2")
    two = request("b", one.prompt_token_ids, 2, salt="s2")
    h = harness(roots={one.sampling.seed: "s1", two.sampling.seed: "s2"})
    h.add(one)
    h.run()
    h.add(two)
    h.run()
    assert h.sink.ends["b"].usage.cached_tokens == 0
    assert_as_expected(h, one, root="s1")
    assert_as_expected(h, two, root="s2")
