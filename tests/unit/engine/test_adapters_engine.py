"""Adapters seen from the engine: whoever waits for which, outputs equal the oracle's, and nothing is left behind."""

import math
import random
from collections import Counter

import msgspec
import pytest
from builders import Harness, assert_as_expected, expected, harness, request
from fake_adapters import AdapterOp, AdapterPlan, kind_of
from fake_tiers import TierPlan
from test_engine_outputs import MODES

from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.base.sequence import SequenceStatus
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import Abort, AdapterRef, GenerationRequest

PATIENCE = 250
"""Steps without progress that may pass while one waits for room (the bound is 100 steps of the fake clock)."""
ZIPF = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_num_queued_reqs": 1000, "asynchronous": True}


def with_adapters(**options: object) -> Harness:
    of_plan = {"num_pages", "num_ranks", "max_loras", "max_cpu_loras", "pages", "refuses", "delay", "is_unreadable"}
    plan = AdapterPlan(**{name: value for name, value in options.items() if name in of_plan})  # type: ignore[arg-type]
    rest = {name: value for name, value in options.items() if name not in of_plan}
    return harness(**{"num_blocks": 200, "patience": PATIENCE, "adapters": plan, **rest})  # type: ignore[arg-type]


def step_until(h: Harness, name: str, status: SequenceStatus | Blocker, most: int = 400) -> None:
    for _ in range(most):
        if status in h.states(name):
            return
        h.step()
    raise AssertionError(f"{name} is not {status} after {most} steps")


def step_to_ends(h: Harness, *requests: GenerationRequest, most: int = 400) -> None:
    """Until these have ended, whatever else is under way."""
    for _ in range(most):
        if all(req.request_id in h.sink.ends for req in requests):
            return
        h.step()
    raise AssertionError(f"not ended after {most} steps: {[req.request_id for req in requests]}")


class Gate:
    """Moves that wait until they are let through: by kind and digest."""

    def __init__(self, *held: tuple[str, str]) -> None:
        self.held = set(held)

    def __call__(self, move: AdapterOp, rank: int) -> int | None:
        return None if (kind_of(move), move.adapter.digest) in self.held else 0


# ---- right adapter, always ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tn_03_more_adapters_than_room_beside_the_base_model(mode, num_ranks):
    rng = random.Random(3)
    h = with_adapters(**mode, num_ranks=num_ranks, num_pages=7, max_loras=2, max_cpu_loras=5, num_blocks=40)
    requests = []
    for i in range(60):
        adapter = rng.choice([None, *(f"a{k}" for k in range(12))])
        requests.append(request(f"r{i}", 3 + i % 11, 1 + i % 17, adapter=adapter, n=rng.choice([1, 1, 2])))
    for req in requests:
        h.add(req)
        for _ in range(rng.randrange(3)):
            h.step()
    h.run()
    assert_as_expected(h, *requests)
    stats = h.engine.stats().adapters
    assert stats is not None and stats.evictions > 0 and stats.loads == h.adapters.kinds()["place"]
    assert h.adapters.kinds()["drop"] > 0


def zipf_waits(num_adapters: int, requests_per_s: float) -> list[float]:
    """Seconds to the first token of 500 requests, Poisson arrivals, Zipf over adapters, with room for 8 of them and
    steps of 20 ms; an answer takes 0.5 s in the mean."""
    rng = random.Random(5)
    h = with_adapters(num_pages=16, max_loras=8, max_cpu_loras=64, delay=lambda move, rank: 1, **ZIPF)
    h.step_s = 0.02
    due_s, began_s, waits, requests = h.clock.now_s, {}, {}, []
    weights = [1 / (i + 1) for i in range(num_adapters)]
    while len(waits) < 500:
        while due_s <= h.clock.now_s and len(requests) < 500:
            adapter = f"a{rng.choices(range(num_adapters), weights)[0]}"
            req = request(f"r{len(requests)}", 16, 1 + int(rng.expovariate(1 / 24)), adapter=adapter)
            h.add(req)
            requests.append(req)
            began_s[req.request_id] = due_s
            due_s += rng.expovariate(requests_per_s)
        h.step()
        for delta in (delta for batch in h.sink.batches for delta in batch if delta.first_position == 0):
            waits[delta.request_id] = h.clock.now_s - began_s[delta.request_id]
        h.sink.batches.clear()
    h.run()
    assert_as_expected(h, *requests)
    return sorted(waits.values())


def test_tn_03_waits_do_not_collapse_when_adapters_outnumber_the_room():
    """At rates that take 80 % of what 8 places can serve: whoever waits gets the next place that is free."""
    few, many = zipf_waits(8, 13.0), zipf_waits(512, 13.0)
    assert few[-5] < 0.2 and many[250] < 0.2 and many[-5] < 1.2, (few[-5], many[250], many[-5])


@pytest.mark.parametrize("mode", MODES)
def test_rows_of_different_adapters_and_of_none_share_a_step(mode):
    h = with_adapters(**mode, max_loras=4, num_pages=8)
    requests = [request(f"r{i}", 4, 40, adapter=adapter) for i, adapter in enumerate(["a", "b", None, "c", "a", "d"])]
    h.add(*requests)
    while h.engine.stats().running < 6:
        h.step()
    h.run()
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("mode", MODES)
def test_a_prefix_is_shared_under_one_digest_only(mode):
    h = with_adapters(**mode)
    prompt = [3 + i for i in range(16)]
    for name, adapter, cached in [("one", "a", 0), ("two", "b", 0), ("three", None, 0), ("four", "a", 12)]:
        req = request(name, prompt, 3, adapter=adapter)
        h.add(req)
        h.run()
        assert_as_expected(h, req)
        assert h.sink.ends[name].usage.cached_tokens == cached


@pytest.mark.parametrize("mode", MODES)
def test_tn_02_other_content_under_the_same_name_while_fifty_streams_run(mode):
    def version(name: str, digest: str, max_tokens: int) -> GenerationRequest:
        ref = AdapterRef(name="same", digest=digest, source=f"folder-{digest}")
        return msgspec.structs.replace(request(name, prompt, max_tokens), adapter=ref)

    prompt = [3 + i for i in range(13)]
    h = with_adapters(**mode, num_blocks=900, max_num_seqs=50, max_num_batched_tokens=700, num_pages=4)
    old = [version(f"old{i}", "one", 30 + i) for i in range(50)]
    h.add(*old)
    step_until(h, "old49", SequenceStatus.RUNNING, most=20)
    assert h.engine.stats().running == 50
    new = [version(f"new{i}", "two", 12) for i in range(4)]
    h.add(*new)
    h.run()
    assert_as_expected(h, *old, *new)
    assert h.sink.ends["new0"].usage.cached_tokens == 0, "none of fifty equal prompts under the other content"
    h.add(version("again", "one", 3))
    h.run()
    assert h.sink.ends["again"].usage.cached_tokens == 12


@pytest.mark.parametrize("mode", MODES)
def test_preempted_sequences_keep_their_adapter(mode):
    h = with_adapters(**mode, num_blocks=24, num_pages=4, max_loras=2, max_num_seqs=6)
    requests = [request(f"r{i}", 4 + i, 24, adapter="abc"[i % 3]) for i in range(12)]
    h.add(*requests)
    h.run()
    assert h.engine.stats().preemptions > 0
    assert_as_expected(h, *requests)


def test_kv_loaded_from_the_host_belongs_to_the_adapter():
    h = with_adapters(num_blocks=12, tiers=TierPlan(host_slots=64), max_num_seqs=2)
    first = request("first", 24, 2, adapter="a")
    h.add(first)
    h.run()
    for i in range(4):
        h.add(request(f"over{i}", 24, 2, adapter="b"))
    h.run()
    again = request("again", [*first.prompt_token_ids, 5, 6], 4, adapter="a")
    other = request("other", [*first.prompt_token_ids, 5, 6], 4, adapter="c")
    h.add(again, other)
    h.run()
    assert_as_expected(h, again, other)
    assert h.sink.ends["again"].usage.cached_tokens == 24 and h.sink.ends["other"].usage.cached_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_request_waits_for_its_adapter_and_goes_on(mode):
    whole = request("a", 9, 12, n=2, adapter="x")
    full = [expected(whole, choice, 512, "x")[0] for choice in range(2)]
    h = with_adapters(**mode)
    h.add(request("a", 9, 12, n=2, adapter="x", resume=[tokens[:5] for tokens in full], attempt=1))
    h.run()
    assert [h.sink.tokens["a", choice] for choice in range(2)] == [tokens[5:] for tokens in full]


# ---- waiting ----


def test_nobody_waits_for_anothers_adapter():
    gate = Gate(("fetch", "far"))
    h = with_adapters(delay=gate)
    h.add(request("far", 4, 4, adapter="far"), request("base", 4, 4))
    while "base" not in h.sink.ends:
        h.step()
    assert h.states("far") == [Blocker.ADAPTER]
    gate.held.clear()
    h.run()
    assert_as_expected(h, request("far", 4, 4, adapter="far"))


def test_a_fetch_begins_while_there_is_no_room_yet():
    h = with_adapters(num_pages=2)
    h.add(request("a", 4, 18, adapter="a"))
    step_until(h, "a", SequenceStatus.RUNNING)
    h.add(request("b", 4, 4, adapter="b"))
    h.step()
    h.step()
    assert h.engine.adapter_residency() == {"a": "device", "b": "host"}
    h.run()
    assert h.engine.adapter_residency() == {"a": "host", "b": "device"}


@pytest.mark.parametrize("kind", ["fetch", "place"])
@pytest.mark.parametrize("how", ["abort", "deadline", "supersede"])
def test_who_gives_up_while_waiting_leaves_nothing(kind, how):
    gate = Gate((kind, "x"))
    h = with_adapters(delay=gate)
    h.add(request("a", 4, 4, adapter="x", n=2, deadline_s=0.1 if how == "deadline" else None))
    for _ in range(3):
        h.step()
    assert Blocker.ADAPTER in h.states("a")
    if how == "abort":
        h.engine.abort(Abort(request_id="a", attempt=0))
    elif how == "supersede":
        h.engine.add_request(request("a", 4, 4, attempt=1))
        h.executor.wanted[request("a", 4).sampling.seed] = None
        assert h.sink.ends.pop("a").finish_reasons == ["abort", "abort"]
        h.sink.reasons.clear()
    while h.engine.has_work():
        h.step()
    gate.held.clear()
    h.run()
    if how == "deadline":
        assert h.sink.ends["a"].refused is not None and h.sink.ends["a"].refused[0] == 503
    h.add(request("next", 4, 4, adapter="x"))
    h.run()
    assert_as_expected(h, request("next", 4, 4, adapter="x"))


def flow_of(h: Harness, adapter: str, most: int, until: str) -> int:
    """Requests for one adapter without a pause; how many have begun before `until` had its first token."""
    for i in range(most):
        if (until, 0) in h.sink.tokens:
            return i
        h.add(request(f"flow{i}", 4, 12, adapter=adapter))
        for _ in range(5):
            h.step()
    raise AssertionError(f"{until} is starved")


def test_an_endless_flow_for_one_adapter_does_not_keep_another_waiting():
    h = with_adapters(num_pages=2)
    h.add(request("first", 4, 12, adapter="a"))
    step_until(h, "first", SequenceStatus.RUNNING)
    h.add(request("b", 4, 4, adapter="b"))
    begun_s = h.clock.now_s
    flow_of(h, "a", 100, "b")
    assert h.clock.now_s - begun_s < 1.6, "the bound, what had run, and the copy"
    h.run()


def test_those_who_waited_for_an_adapter_are_served_before_it_goes_again():
    h = with_adapters(num_pages=2, max_num_seqs=1)
    h.add(request("hold", 4, 150, adapter="h"))
    step_until(h, "hold", SequenceStatus.RUNNING)
    h.add(*(request(f"a{i}", 4, 5, adapter="a") for i in range(4)), request("c", 4, 2, adapter="c"))
    h.run()
    assert list(h.sink.ends) == ["hold", "a0", "a1", "a2", "a3", "c"], "although c has waited longer than the bound"
    assert h.adapters.kinds()["place"] == 3


def test_one_of_those_who_waited_is_served_in_any_case_and_all_only_within_the_bound():
    h = with_adapters(num_pages=2, max_num_seqs=1)
    h.add(request("hold", 4, 300), *(request(f"a{i}", 4, 2, adapter="a") for i in range(3)))
    step_until(h, "a0", SequenceStatus.WAITING)
    h.add(request("b", 4, 2, adapter="b"))
    h.run()
    assert list(h.sink.ends) == ["hold", "a0", "b", "a1", "a2"]
    assert h.adapters.kinds()["place"] == 3


def test_a_sequence_that_only_queued_for_a_draining_adapter_waits_in_line_again():
    h = with_adapters(num_pages=2, max_num_seqs=1)
    h.add(request("run", 4, 400, adapter="a"))
    step_until(h, "run", SequenceStatus.RUNNING)
    h.add(request("queued", 4, 2, adapter="a"))
    h.add(request("b", 4, 2, adapter="b"))
    step_until(h, "queued", Blocker.ADAPTER)
    h.run()
    assert list(h.sink.ends) == ["run", "b", "queued"]


def test_an_adapter_stops_draining_when_its_room_is_no_longer_wanted():
    h = with_adapters(num_pages=2, max_num_seqs=1)
    h.add(request("run", 4, 300, adapter="a"))
    step_until(h, "run", SequenceStatus.RUNNING)
    h.add(request("queued", 4, 2, adapter="a"), request("b", 4, 2, adapter="b"))
    step_until(h, "queued", Blocker.ADAPTER)
    h.engine.abort(Abort(request_id="b", attempt=0))
    step_until(h, "queued", SequenceStatus.WAITING, most=10)
    h.run()
    assert h.adapters.kinds()["place"] == 1


def test_an_adapter_as_large_as_the_device_is_placed():
    h = with_adapters(num_pages=6, pages=lambda digest, rank: 6 if digest == "big" else 1 + rank, num_ranks=2)
    h.add(*(request(f"s{i}", 4, 150, adapter=f"s{i}") for i in range(3)))
    step_until(h, "s2", SequenceStatus.RUNNING)
    h.add(request("big", 4, 5, adapter="big"))
    for i in range(3, 40):
        h.add(request(f"s{i}", 4, 20, adapter=f"s{i % 5}"))
        h.step()
    h.run()
    ends = list(h.sink.ends)
    assert ends.index("big") < len(ends) - 5, "not behind everybody who came later"


# ---- max-loras in a step ----


@pytest.mark.parametrize("mode", MODES)
def test_adapters_with_rows_take_turns_when_they_are_more_than_max_loras(mode):
    """FakeExecutor counts the adapters of each plan."""
    h = with_adapters(**mode, num_pages=20, max_loras=2, num_blocks=600)
    requests = [request(f"r{i}", 4, 400, adapter=adapter) for i, adapter in enumerate(["a", "b", "c", "d", None])]
    h.add(*requests)
    for name in ("r0", "r1", "r2", "r3"):
        step_until(h, name, SequenceStatus.RUNNING, most=20)
    before = {name: len(h.sink.tokens.get((name, 0), [])) for name in ("r0", "r1", "r2", "r3", "r4")}
    planned = len(h.executor.plans)
    for _ in range(40):
        h.step()
    gained = {name: len(h.sink.tokens[name, 0]) - count for name, count in before.items()}
    turns = Counter(work.row for plan in h.executor.plans[planned:] for work in plan.work)
    (own,) = [row for row, held in h.executor.rows.items() if held.slot is None]
    base = gained.pop("r4")
    assert turns[own] == max(turns.values()), "the base model waits for no turn"
    if "drafts" not in mode:
        assert base >= max(gained.values()), "the base model waits for no turn"
        assert max(gained.values()) <= 1.4 * min(gained.values()), f"not in turns: {gained}"
    if mode in ({"asynchronous": False}, {"asynchronous": True}):
        assert base >= 39 and 18 <= min(gained.values()) <= 22, "every second step each"
    h.run()
    assert_as_expected(h, *requests)


def test_a_long_prompt_with_others_behind_it_leaves_another_adapter_its_turns():
    """Prompts fill the steps, so that the first in the queue, whose adapter has a row, does not get one."""
    h = with_adapters(num_pages=20, max_loras=1, num_blocks=600, max_num_batched_tokens=4)
    h.add(request("b", 4, 150, adapter="b"))
    step_until(h, "b", SequenceStatus.RUNNING)
    h.add(*(request(f"a{i}", 200, 2, adapter="a") for i in range(3)))
    step_until(h, "a0", SequenceStatus.RUNNING)
    before = len(h.sink.tokens["b", 0])
    for _ in range(60):
        h.step()
    assert 25 <= len(h.sink.tokens["b", 0]) - before <= 35
    h.run()


def test_an_answer_of_another_adapter_does_not_hold_up_a_first_token():
    h = with_adapters(num_pages=20, max_loras=2)
    h.add(*(request(f"bring-{adapter}", 4, 2, adapter=adapter) for adapter in "abcd"))
    h.run()
    h.add(request("a", 4, 200, adapter="a"), request("b", 4, 200, adapter="b"))
    step_until(h, "b", SequenceStatus.RUNNING)
    h.add(request("c", 4, 100, adapter="c"), request("d", 4, 100, adapter="d"))
    for _ in range(6):
        h.step()
    assert h.sink.tokens["c", 0] and h.sink.tokens["d", 0]
    h.run()


def test_at_most_twice_max_loras_adapters_have_rows_and_nobody_starves():
    h = with_adapters(num_pages=20, max_loras=2)
    h.add(*(request(name, 4, 10, adapter=name) for name in "abcd"))
    step_until(h, "d", SequenceStatus.RUNNING)
    h.add(request("e", 4, 4, adapter="e"))
    step_until(h, "e", Blocker.TURN)
    done = flow_of(h, "a", 100, "e")
    assert done <= 12, "as soon as the adapter with the fewest rows has drained"
    h.run()


def test_the_base_model_overtakes_a_sequence_blocked_by_max_loras():
    h = with_adapters(num_pages=20, max_loras=1)
    h.add(request("before", 4, 2, adapter="c"))
    h.run()
    h.sink.ends.clear()
    h.add(request("a", 4, 60, adapter="a"), *(request(name, 4, 90, adapter="b") for name in ("b", "b2")))
    step_until(h, "b2", SequenceStatus.RUNNING)
    h.add(request("c", 4, 4, adapter="c"), request("base", 4, 4), request("a2", 4, 4, adapter="a"))
    h.run()
    assert list(h.sink.ends) == ["base", "a", "c", "a2", "b", "b2"], "the adapter with the fewest rows drains"


# ---- refusals ----


def test_without_enable_lora_an_adapter_is_unknown():
    h = harness()
    with pytest.raises(RequestRefused) as refusal:
        h.add(request("a", 3, adapter="x"))
    assert (refusal.value.status, refusal.value.code, refusal.value.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", ["fetch", "place"])
def test_an_adapter_that_a_rank_refuses_ends_its_requests_with_the_reason(num_ranks, kind):
    broken = {"x"}

    def refuses(move: AdapterOp, rank: int) -> str | None:
        bad = kind_of(move) == kind and move.adapter.digest in broken and rank == num_ranks - 1
        return "layer 3 q_proj is not finite" if bad else None

    h = with_adapters(refuses=refuses, num_ranks=num_ranks)
    good = request("good", 4, 9, adapter="y")
    h.add(request("x1", 4, adapter="x", n=2), request("x2", 4, adapter="x"), good)
    h.run()
    for name in ("x1", "x2"):
        refused = h.sink.ends[name].refused
        assert refused is not None and refused[:3] == (400, "invalid_value", "model")
        assert "'x'" in refused[3] and "layer 3 q_proj is not finite" in refused[3]
    assert_as_expected(h, good)
    assert h.engine.stats().rejected["adapter"] == 2
    fetches = h.adapters.kinds()["fetch"]
    with pytest.raises(RequestRefused, match="not finite") as refusal:
        h.add(request("x3", 4, adapter="x"))
    assert refusal.value.status == 400 and h.adapters.kinds()["fetch"] == fetches
    broken.clear()
    h.clock.now_s += 31.0
    mended = request("x4", 4, 5, adapter="x")
    h.add(mended)
    h.run()
    assert_as_expected(h, mended)
    assert h.adapters.host[0] >= {"x", "y"}


@pytest.mark.parametrize("kind", ["fetch", "place"])
def test_a_source_that_cannot_be_read_is_503_and_its_paths_are_not_sent(kind, caplog):
    h = with_adapters(
        refuses=lambda move, rank: "/srv/secret: EIO" if kind_of(move) == kind else None, is_unreadable=True
    )
    h.add(request("a", 4, adapter="x"))
    h.run()
    message = "adapter 'x' cannot be served: its files cannot be read at the moment, or are not those that were listed"
    assert h.sink.ends["a"].refused == (503, "service_unavailable", None, message)
    assert "/srv/secret: EIO" in caplog.text
    with pytest.raises(RequestRefused, match="at the moment") as refusal:
        h.add(request("b", 4, adapter="x"))
    assert (refusal.value.status, refusal.value.code) == (503, "service_unavailable")


def test_a_refusal_names_the_adapter_as_each_request_does():
    h = with_adapters(refuses=lambda move, rank: "not finite")

    def named(name: str) -> GenerationRequest:
        ref = AdapterRef(name=name, digest="d", source="s")
        params = request(name, 2, 3).sampling
        return GenerationRequest(request_id=name, prompt_token_ids=[3, 4], sampling=params, adapter=ref)

    h.add(named("mine"), named("theirs"))
    h.run()
    for name in ("mine", "theirs"):
        assert h.sink.ends[name].refused[3] == f"adapter {name!r} cannot be served: not finite"
    with pytest.raises(RequestRefused, match="'third' cannot be served: not finite"):
        h.add(named("third"))


def test_another_source_of_the_same_content_is_tried_at_once():
    h = with_adapters(refuses=lambda move, rank: "no such folder" if move.adapter.source == "x" else None)
    moved = GenerationRequest(
        request_id="moved",
        prompt_token_ids=[3, 4],
        sampling=request("moved", 2, 3).sampling,
        adapter=AdapterRef(name="x", digest="x", source="elsewhere"),
    )
    h.add(request("old", 4, adapter="x"), moved)
    h.run()
    assert h.sink.ends["old"].refused is not None
    assert_as_expected(h, moved)


def test_an_adapter_larger_than_the_device_is_refused_with_the_numbers():
    h = with_adapters(num_pages=4, pages=lambda digest, rank: 5 if digest == "x" else 4)
    h.add(request("x", 4, adapter="x"), request("y", 4, 3, adapter="y"))
    h.run()
    refused = h.sink.ends["x"].refused
    assert refused is not None and "takes 5 pages" in refused[3] and "holds 4" in refused[3]
    assert h.engine.adapter_residency() == {"y": "device"}


def test_a_source_that_never_answers_ends_its_requests():
    """Also one that names another source of the same adapter, and came later."""
    h = with_adapters(delay=Gate(("fetch", "x")))
    h.add(request("a", 4, adapter="x"))
    h.step()
    other = AdapterRef(name="x", digest="x", source="elsewhere")
    h.add(msgspec.structs.replace(request("b", 4, adapter="x"), adapter=other))
    for _ in range(601):
        assert "a" not in h.sink.ends or h.clock.now_s > 700.0
        h.clock.now_s += 1.0 - h.step_s
        h.step()
    for name in "ab":
        refused = h.sink.ends[name].refused
        assert refused is not None and refused[0] == 503 and "600 s" in refused[3]
    assert not h.engine.has_work()


def test_a_fetch_that_is_late_takes_no_room_on_the_host():
    """Its place is for those that are waited for; what it brings in the end is dropped if there is no room by then."""
    gate = Gate(("fetch", "s3://x"))
    h = with_adapters(num_pages=4, max_cpu_loras=1, delay=gate)
    h.add(request("a", 4, adapter="s3://x"))
    for _ in range(602):
        h.clock.now_s += 1.0
        h.engine.turn(0.0)
    assert h.sink.ends["a"].refused is not None
    later = [request(f"r{i}", 4, 6, adapter=f"a{i}") for i in range(3)]
    h.add(*later)
    step_to_ends(h, *later)
    assert_as_expected(h, *later)
    gate.held.clear()
    h.run()
    assert len(h.adapters.host[0]) == 1 and list(h.engine.adapter_residency().values()).count("host") == 0


def test_a_fetch_whose_requests_have_left_takes_no_room_on_the_host():
    gate = Gate(("fetch", "s3://x"))
    h = with_adapters(num_pages=4, max_cpu_loras=1, delay=gate)
    h.add(request("a", 4, adapter="s3://x"))
    h.step()
    h.engine.abort(Abort(request_id="a", attempt=0))
    other = request("b", 4, 6, adapter="b")
    h.add(other)
    step_to_ends(h, other)
    assert_as_expected(h, other)
    again = request("again", 4, 6, adapter="s3://x")
    h.add(again)
    gate.held.clear()
    h.run()
    assert_as_expected(h, again)
    assert h.adapters.kinds()["fetch"] == 2 and len(h.adapters.host[0]) == 1, "the first fetch served it"


def test_a_pin_that_does_not_come_takes_no_room_from_requests():
    h = with_adapters(num_pages=4, max_cpu_loras=1, delay=Gate(("fetch", "s3://p")))
    h.engine.set_pinned_adapters([AdapterRef(name="p", digest="s3://p", source="s3://p")])
    wanted = request("a", 4, 6, adapter="a")
    h.add(wanted)
    step_to_ends(h, wanted)
    assert_as_expected(h, wanted)


def test_a_slow_bucket_holds_up_no_folder():
    """However many of its adapters are waited for."""
    remote = [f"s3://x{i}" for i in range(6)]
    h = with_adapters(delay=Gate(*(("fetch", digest) for digest in remote)))
    near = request("near", 4, 6, adapter="a")
    h.add(*(request(f"r{i}", 4, adapter=digest) for i, digest in enumerate(remote)), near)
    step_to_ends(h, near)
    assert_as_expected(h, near)
    assert h.adapters.kinds()["fetch"] == 5, "four of the bucket's at a time"


# ---- host copies, pins, counts ----


def test_host_copies_are_bounded_and_the_oldest_goes():
    h = with_adapters(num_pages=4, max_cpu_loras=3)
    for i in range(8):
        h.add(request(f"r{i}", 4, 2, adapter=f"a{i}"))
        h.run()
        assert max(map(len, h.adapters.host)) <= 3
    assert h.engine.adapter_residency() == {"a5": "host", "a6": "device", "a7": "device"}


def test_a_single_host_copy_serves_any_number_of_adapters():
    h = with_adapters(num_pages=4, max_cpu_loras=1, num_ranks=2)
    requests = [request(f"r{i}", 4, 6, adapter=f"a{i % 5}") for i in range(20)]
    h.add(*requests)
    h.run()
    assert_as_expected(h, *requests)


def test_pinned_adapters_come_by_themselves_and_stay():
    h = with_adapters(num_pages=4)
    h.engine.set_pinned_adapters([AdapterRef(name="p", digest="p", source="p")])
    h.drain_transfers()
    assert h.engine.adapter_residency() == {"p": "device"}
    for i in range(5):
        h.add(request(f"r{i}", 4, 2, adapter=f"a{i}"))
        h.run()
    assert h.engine.adapter_residency()["p"] == "device"
    h.engine.set_pinned_adapters([])
    h.add(*(request(f"s{i}", 4, 2, adapter=f"b{i}") for i in range(2)))
    h.run()
    assert h.engine.adapter_residency()["p"] == "host"


def test_pins_that_fill_the_device_give_way_after_the_bound():
    h = with_adapters(num_pages=4)
    h.engine.set_pinned_adapters([AdapterRef(name=p, digest=p, source=p) for p in ("p", "q")])
    h.drain_transfers()
    begun_s = h.clock.now_s
    h.add(request("a", 4, 2, adapter="a"))
    h.run()
    assert 1.0 < h.clock.now_s - begun_s < 1.5
    assert_as_expected(h, request("a", 4, 2, adapter="a"))


def test_a_pin_that_is_refused_is_tried_again_later_not_all_the_time():
    h = with_adapters(refuses=lambda move, rank: "gone" if move.adapter.digest == "p" else None)
    h.engine.set_pinned_adapters([AdapterRef(name="p", digest="p", source="p")])
    h.drain_transfers()
    for i in range(5):
        h.add(request(f"r{i}", 4, 9))
        h.run()
    assert h.adapters.kinds()["fetch"] == 1
    h.clock.now_s += 31.0
    h.add(request("later", 4, 9))
    h.run()
    assert h.adapters.kinds()["fetch"] == 2


def test_a_pin_that_is_refused_is_tried_again_without_any_work():
    h = with_adapters(refuses=lambda move, rank: "gone")
    h.engine.set_pinned_adapters([AdapterRef(name="p", digest="p", source="p")])
    h.drain_transfers()
    assert 29.0 < h.engine.idle_s <= 30.0
    h.engine.turn(0.0)
    assert h.adapters.kinds()["fetch"] == 1
    h.clock.now_s += h.engine.idle_s
    h.engine.turn(0.0)
    assert h.adapters.kinds()["fetch"] == 2
    h.engine.set_pinned_adapters([])
    h.drain_transfers()
    assert h.engine.idle_s == math.inf


def test_adapter_numbers():
    h = with_adapters(num_pages=4)
    h.add(*(request(f"r{i}", 4, 4, adapter=f"a{i}") for i in range(3)))
    h.step()
    stats = h.engine.stats().adapters
    assert stats is not None and stats.waiting + h.engine.stats().running == 3
    h.run()
    stats = h.engine.stats().adapters
    assert stats is not None
    assert (stats.num_pages, stats.free_pages, stats.resident, stats.on_host, stats.in_use) == (4, 0, 2, 3, 0)
    assert (stats.loads, stats.evictions, stats.refused, stats.load_s.count) == (3, 1, 0, 3)
