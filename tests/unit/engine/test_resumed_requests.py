"""Requests that come from a group that was lost: let in, counted once, and, if they may be to blame, run alone."""

import msgspec
import pytest
from builders import Harness, assert_as_expected, expected, harness, request
from fake_adapters import AdapterOp, AdapterPlan
from fake_tiers import TierPlan
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_outputs import MODES, ONE_TOKEN_MODES

from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.engine.waiting.probation import PROBATION_TOKENS
from tandem.workers.messages.errors import QueueFull
from tandem.workers.messages.request import Abort, GenerationRequest
from tandem.workers.messages.transfer import FetchAdapter
from tests.support.engine_invariants import check_invariants

ADAPTERS = ("a", "b", "s3://c")


def names_in_flight(h: Harness) -> list[set[str]]:
    """The requests of each step in flight."""
    return [{seq.state.request.request_id for seq in step.sequences} for step in h.engine._in_flight_steps]


def watch_steps(h: Harness) -> list[list[set[str]]]:
    """After each plan: the requests of the steps in flight. Grows while the engine runs."""
    seen: list[list[set[str]]] = []
    submit = h.executor.submit

    def submit_and_note(plan: object) -> None:
        submit(plan)
        seen.append(names_in_flight(h))

    h.executor.submit = submit_and_note
    return seen


# ---- let in ----


@pytest.mark.parametrize("limits", [{"max_num_queued_reqs": 1}, {"max_num_queued_tokens": 3}])
def test_a_resumed_request_passes_no_queue_limit_again(limits):
    h = harness(**limits)
    h.add(request("a", 3))
    with pytest.raises(QueueFull):
        h.add(request("new", 3))
    moved = [request("moved", 3, attempt=1), request("told", 3, resume=[[5]])]
    h.add(*moved)
    with pytest.raises(QueueFull):
        h.add(request("other", 3))
    h.run()
    assert_as_expected(h, *moved)
    h.add(request("b", 3))  # nothing is left of what has gone
    with pytest.raises(QueueFull):
        h.add(request("c", 3))


# ---- counted once ----


def test_what_an_earlier_group_has_begun_is_charged_and_counted_once():
    """The tenant pays for the tokens that are new; the prompt was paid where the request began."""

    def served(**more: object) -> tuple[Harness, float]:
        h = harness()
        h.engine.set_weights({})
        h.add(request("a", 40, 10, resume=[[5, 6, 7, 8]], attempt=1, **more))
        h.run()
        return h, sum(h.engine.drain_charges().values())

    h, charge = served(begun=True)
    other, whole = served()
    assert whole - charge >= 40 > 0
    stats = h.engine.stats()
    assert (stats.prompt_tokens, other.engine.stats().prompt_tokens) == (0, 40)
    assert stats.generation_tokens == 6
    assert stats.queue_time_s.count == 0 and other.engine.stats().queue_time_s.count == 1
    assert stats.time_to_first_token_s.count == 0, "its first token came from another group"
    assert stats.requests.generation_tokens.total == 10
    assert stats.requests.time_per_output_token_s.total == pytest.approx(stats.requests.decode_s.total / 5)
    assert h.sink.ends["a"].usage.prompt_tokens == 40


def test_a_request_that_had_only_waited_elsewhere_is_counted_where_it_begins():
    h = harness()
    begun = request("begun", 3, 4, resume=[[5]], attempt=1, begun=True)
    h.add(begun, request("a", 10, 4, attempt=1))  # both get their rows in one step
    h.run()
    assert h.engine.stats().prompt_tokens == 10 and h.engine.stats().time_to_first_token_s.count == 1


def test_the_first_row_is_told_once_and_before_the_first_token():
    h = harness(max_num_seqs=1, stalls=2)
    h.add(request("a", 9, 6), request("b", 9, 2, n=2))
    assert h.sink.begun == {}
    h.step()
    assert h.sink.begun == {"a": 0} and not h.sink.tokens
    h.run()
    assert set(h.sink.begun) == {"a", "b"}
    h.sink.begun.clear()
    h.sink.ends.clear(), h.sink.tokens.clear(), h.sink.reasons.clear()
    h.add(request("a", 9, 2))
    h.run()
    assert h.sink.begun == {"a": 8}, "with the prompt tokens that were found"


# ---- choices that have ended ----


@pytest.mark.parametrize("mode", MODES)
def test_a_choice_that_was_stopped_elsewhere_is_not_decoded_on(mode):
    h = harness(**mode)
    req = request("a", 9, 12, n=3, resume=[[5, 6], [7], [8, 9]], ended=[0, 2])
    h.add(req)
    h.run()
    assert h.sink.tokens["a", 0] == h.sink.tokens["a", 2] == []
    assert h.sink.tokens["a", 1] == expected(req, 1, 512)[0]
    ended = h.sink.ends["a"]
    assert ended.finish_reasons == ["stop", "length", "stop"] and ended.positions == [2, 12, 2]
    assert h.engine.stats().generation_tokens == 11


# ---- alone ----


@pytest.mark.parametrize("mode", ONE_TOKEN_MODES)
@pytest.mark.parametrize("n", [1, 3])
def test_suspects_run_alone_one_after_the_other_and_then_with_the_others(mode, n):
    h = harness(**mode, num_blocks=200)
    others = [request(f"o{i}", 6 + i, 60) for i in range(3)]
    h.add(*others)
    h.step()
    seen = watch_steps(h)
    suspects = [
        request("s", 40, 30, n=n, resume=[[5, 6]] * n, attempt=1, begun=True, suspect=True),
        request("t", 5, 30, attempt=1, begun=True, suspect=True),
    ]
    h.add(*suspects)
    h.run()
    assert_as_expected(h, *others, *suspects)
    of_s = [i for i, steps in enumerate(seen) if "s" in steps[-1]]
    of_t = [i for i, steps in enumerate(seen) if "t" in steps[-1]]
    alone = [i for i, steps in enumerate(seen) if steps in ([{"s"}], [{"t"}])]
    assert set(of_s[: 2 + PROBATION_TOKENS - 1]) <= set(alone), "its chunks of prompt and its first tokens"
    assert set(of_t[:PROBATION_TOKENS]) <= set(alone)
    mixed = [i for i in of_s if len(seen[i][-1]) > 1]
    assert mixed and min(mixed) < max(of_s), "it joins the others"
    first_t = min(of_t)
    assert sum(i < first_t for i in of_s) >= PROBATION_TOKENS, "one at a time"
    between = [i for i in range(min(alone), first_t) if seen[i] == [{"o0", "o1", "o2"}]]
    assert len(between) >= PROBATION_TOKENS, "the others have every second step"


def test_a_suspect_that_leaves_makes_room_for_the_next():
    h = harness()
    h.add(request("a", 6, 40))
    suspects = [request(name, 6, 20, attempt=1, suspect=True, n=2) for name in "stuv"]
    h.add(*suspects)
    h.step()
    h.engine.abort(Abort(request_id="t", attempt=1, choice=0))  # while it waits for its turn
    h.engine.abort(Abort(request_id="u", attempt=1))
    h.engine.abort(Abort(request_id="s", attempt=1))  # while it has the turn
    h.run()
    assert h.sink.ends["t"].finish_reasons == ["abort", "length"]
    assert h.sink.ends["s"].finish_reasons == h.sink.ends["u"].finish_reasons == ["abort", "abort"]
    assert_as_expected(h, suspects[3])


def test_a_suspect_that_waits_for_its_turn_keeps_its_deadline():
    h = harness()
    h.add(request("s", 6, 40, attempt=1, suspect=True), request("t", 6, 4, attempt=1, suspect=True, deadline_s=0.005))
    h.run()
    assert h.sink.ends["t"].refused is not None and h.sink.ends["t"].refused[0] == 503
    assert h.sink.ends["s"].finish_reasons == ["length"]


def test_a_suspect_with_a_small_pool_takes_its_room_from_the_others():
    h = harness(num_blocks=12, block_size=4)
    others = [request(f"o{i}", 8, 20) for i in range(2)]
    h.add(*others)
    h.step()
    suspect = request("s", 20, 20, attempt=1, suspect=True)
    h.add(suspect)
    h.run()
    assert_as_expected(h, suspect, *others)


def test_suspects_fetch_their_adapters_at_once_and_one_that_waits_for_its_own_holds_up_nobody():
    held = {"s3://slow"}

    def delay(move: AdapterOp, rank: int) -> int | None:
        return None if move.adapter.digest in held else 0

    h = harness(adapters=AdapterPlan(delay=delay), num_blocks=200, patience=400)
    other = request("o", 6, 100)
    h.add(other)
    h.step()
    seen = watch_steps(h)
    slow = request("s", 6, 30, attempt=1, suspect=True, adapter="s3://slow", n=2)
    suspects = [
        request("t", 6, 10, attempt=1, suspect=True),
        request("u", 6, 10, attempt=1, suspect=True, adapter="fast"),
    ]
    h.add(slow, *suspects)
    h.step()
    fetched = {move.adapter.digest for move in h.adapters.sent if isinstance(move, FetchAdapter)}
    assert fetched == {"s3://slow", "fast"}
    for _ in range(60):
        h.step()
    assert_as_expected(h, *suspects)
    assert h.states("s") == [Blocker.ADAPTER, Blocker.FORK]
    held.clear()
    h.run()
    assert_as_expected(h, slow, other)
    for name in "stu":
        mine = [steps for steps in seen if name in steps[-1]]
        assert all(steps == [{name}] for steps in mine[:PROBATION_TOKENS]), "it began with others"


@pytest.mark.parametrize("n", [1, 2])
def test_a_suspect_whose_adapter_has_no_place_in_the_step_leaves_its_turn_to_the_next(n):
    h = harness(adapters=AdapterPlan(max_loras=1), num_blocks=200, patience=400)
    others = [request("o", 6, 60, adapter="b"), request("p", 6, 60, adapter="c")]
    h.add(*others)
    while "p" not in h.sink.begun:
        h.step()
    seen = watch_steps(h)
    blocked = request("s", 6, 10, attempt=1, suspect=True, adapter="a", n=n)
    suspects = [
        request("t", 6, 10, attempt=1, suspect=True),
        request("u", 6, 10, attempt=1, suspect=True, adapter="b"),
    ]
    h.add(blocked)
    while h.states("s")[0] != Blocker.TURN:
        h.step()
    h.add(*suspects)
    while "t" not in h.sink.ends:
        h.step()
    assert not {"o", "p", "s", "u"} & h.sink.ends.keys() and h.sink.begun.keys() == {"o", "p", "t"}
    assert h.states("s")[0] == Blocker.TURN and h.states("u") == [Blocker.TURN], "its adapter leaves for that of s"
    h.run()
    assert_as_expected(h, blocked, *others, *suspects)
    for name in "stu":
        mine = [steps for steps in seen if name in steps[-1]]
        assert all(steps == [{name}] for steps in mine[:PROBATION_TOKENS]), "it began with others"


def test_a_suspect_gets_its_turn_when_the_last_request_that_ran_ends():
    """Nothing runs and nobody else comes: the plan that frees its adapter's place is without work."""
    h = harness(adapters=AdapterPlan(max_loras=1), num_blocks=200, patience=400)
    others = [request("o", 6, 9, adapter="b"), request("p", 6, 9, adapter="c")]
    blocked = request("s", 6, 10, attempt=1, suspect=True, adapter="a")
    h.add(*others)
    while "p" not in h.sink.begun:
        h.step()
    h.add(blocked)
    h.run()
    assert_as_expected(h, *others, blocked)


def test_a_suspect_that_waits_for_its_turn_keeps_no_adapter_off_the_device():
    """Two pages hold one adapter. The suspect before it has a prompt of 2 s."""
    h = harness(adapters=AdapterPlan(num_pages=2), num_blocks=200, max_num_batched_tokens=2)
    h.add(request("s", 400, 8, attempt=1, suspect=True))
    held = request("t", 6, 8, attempt=1, suspect=True, adapter="a")
    h.add(held)
    while h.states("t") != [Blocker.ALONE]:
        h.step()
    asked_s = h.clock.now_s
    other = request("other", 6, 4, adapter="b")
    h.add(other)
    while "other" not in h.sink.begun:
        h.step()
    assert 1.0 < h.clock.now_s - asked_s < 1.5, "the bound, then the copy"
    assert "t" not in h.sink.begun and ("s", 0) not in h.sink.tokens
    h.run()
    assert_as_expected(h, held, other)


@settings(max_examples=60)
@given(data=st.data())
def test_any_mix_of_suspects_and_others_ends_with_the_right_tokens(data):
    """Few blocks, so that they preempt each other, with KV below or without; aborts at any time; an adapter or none,
    and too few pages for all of them."""
    mode = data.draw(st.sampled_from([param.values[0] for param in MODES]), "mode")
    delays = data.draw(st.fixed_dictionaries(dict.fromkeys(ADAPTERS, st.integers(0, 30))), "looks at an adapter")
    pages, host_slots = data.draw(st.integers(2, 6), "pages"), data.draw(st.sampled_from([0, 40]), "host slots")
    h = harness(
        **mode,
        num_blocks=data.draw(st.integers(14, 40), "blocks"),
        max_num_seqs=data.draw(st.integers(1, 6)),
        patience=700,
        tiers=TierPlan(host_slots=host_slots) if host_slots else None,
        adapters=AdapterPlan(
            num_pages=pages,
            max_loras=data.draw(st.integers(1, 3), "max_loras"),
            delay=lambda move, rank: delays[move.adapter.digest],
        ),
    )
    seen = watch_steps(h)
    asked, aborted = [], set()
    for number in range(data.draw(st.integers(2, 9), "requests")):
        n = data.draw(st.integers(1, 3))
        resumed = data.draw(st.integers(0, 3))
        req = request(
            f"r{number}",
            data.draw(st.integers(1, 20)),
            data.draw(st.integers(resumed + 1, 12)),
            n=n,
            attempt=1,
            suspect=data.draw(st.booleans()),
            begun=data.draw(st.booleans()),
            resume=[[5] * resumed] * n if resumed else None,
            adapter=data.draw(st.sampled_from([None, *ADAPTERS])),
        )
        asked.append(req)
        h.add(req)
        for _ in range(data.draw(st.integers(0, 5))):
            h.step()
        if data.draw(st.integers(0, 4)) == 0:
            gone = data.draw(st.sampled_from(asked))
            aborted.add(gone.request_id)
            h.engine.abort(Abort(request_id=gone.request_id, attempt=1))
    h.run()
    assert_as_expected(h, *(req for req in asked if req.request_id not in aborted))
    for req in asked:
        if not req.suspect:
            continue
        mine = [steps for steps in seen if req.request_id in steps[-1]]
        alone = 1 if "drafts" in mode else PROBATION_TOKENS  # with drafts so many tokens may come in fewer steps
        assert all(steps == [{req.request_id}] for steps in mine[:alone]), "it began with others"


# ---- who is to blame ----


def test_rows_of_the_failing_steps_are_suspects():
    h = harness(asynchronous=True, stalls=3, max_num_seqs=2)
    h.add(request("a", 5, 9), request("b", 5, 9), request("waits", 5, 9))
    h.step()
    assert names_in_flight(h)
    assert h.engine.losses() == {"a": "suspect", "b": "suspect", "waits": "bystander"}


def test_without_a_step_in_flight_every_row_is_a_suspect():
    h = harness(max_num_seqs=1)
    h.add(request("a", 5, 9), request("waits", 5, 9))
    assert h.engine.losses() == {"a": "bystander", "waits": "bystander"}, "nothing has run"
    h.step()
    h.step()
    assert not names_in_flight(h)
    assert h.engine.losses() == {"a": "suspect", "waits": "bystander"}


def test_only_a_suspect_in_a_step_of_its_own_is_alone():
    h = harness(stalls=3)
    h.add(request("first", 5, 9))
    h.step()
    assert h.engine.losses() == {"first": "suspect"}, "nothing was known against it"
    h.add(request("s", 5, 30, attempt=1, suspect=True))
    told: list[dict[str, str]] = []
    while ("s", 0) not in h.sink.reasons:
        h.step()
        if names_in_flight(h):
            told.append(h.engine.losses())
    assert {"first": "bystander", "s": "alone"} in told
    assert {"first": "suspect", "s": "bystander"} in told, "the others' step"
    assert told[-1]["s"] == "suspect", "it has joined the others"


@pytest.mark.parametrize("mode", MODES)
def test_whose_result_cannot_be_applied_is_known(mode):
    h = harness(**mode)
    h.add(request("first", 5, 30))
    h.step()
    h.add(request("s", 5, 30, attempt=1, suspect=True))
    apply = h.engine.results.apply

    def choke(step, result, now_s):
        if all(seq.state.request.request_id == "s" for seq in step.sequences):
            raise IndexError("a token too much")
        return apply(step, result, now_s)

    h.engine.results.apply = choke
    with pytest.raises(IndexError):
        h.run()
    assert h.engine.losses() == {"first": "bystander", "s": "alone"}


@pytest.mark.parametrize("broken", ["_arrivals.state_of", "_start"])
def test_a_request_that_could_not_be_taken_in_leaves_nothing(broken, monkeypatch):
    """Whether it was queued already or not."""
    h = harness(max_num_queued_reqs=1)
    *path, name = broken.split(".")
    owner = getattr(h.engine.requests, path[0]) if path else h.engine.requests
    real = getattr(owner, name)

    def fail(state, *more):
        if name == "_start":
            real(state)
        raise TypeError("not a number")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(TypeError):
            h.add(request("bad", 3))
    h.engine.abort(Abort(request_id="bad", attempt=0))
    check_invariants(h.engine)
    assert not h.engine.has_work()
    good = request("good", 3)
    h.add(good)  # the queue has room
    h.run()
    assert_as_expected(h, good)


def test_every_field_of_a_request_survives_the_wire():
    sent = request("a", 5, 9, attempt=2, begun=True, suspect=True, ended=[0])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=GenerationRequest) == sent
