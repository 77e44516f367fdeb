"""Requests with a grammar in the engine: blocked while it is compiled, refused if it is wrong or late, kept while it is
used. The ranks are fakes that compile when they are told to."""

from typing import Any

import pytest
from builders import Harness, assert_as_expected, harness, request
from fake_adapters import AdapterPlan

from tandem.workers.engine.base.arrivals import digest_of
from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.messages.errors import RequestRefused
from tandem.workers.messages.request import Abort, GenerationRequest
from tandem.workers.messages.transfer import CompileGrammar, DropGrammar, Failure
from tests.support.engine_invariants import check_invariants


def rig(**more: Any) -> Harness:
    """An engine that may wait long for a grammar."""
    return harness(patience=100, **more)


def grammars(h: Harness, *, delay: int | None = 0, refuses: Failure | None = None) -> None:
    """From now on every grammar is compiled after so many looks, or refused then."""
    h.executor.grammars.delay = lambda text: delay
    h.executor.grammars.refuses = lambda text: refuses


def refused(h: Harness, name: str) -> tuple[int, str]:
    ended = h.sink.ends[name].refused
    assert ended is not None
    return ended[0], ended[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_waits_for_its_grammar_while_others_run(asynchronous: bool) -> None:
    h = rig(asynchronous=asynchronous)
    grammars(h, delay=12)
    asked, plain = request("a", 6, grammar="g"), request("b", 6)
    h.add(asked, plain)
    for _ in range(6):
        h.step()
        assert h.states("a") == [Blocker.GRAMMAR]
    assert h.sink.tokens["b", 0]
    h.run()
    assert_as_expected(h, asked, plain)
    bound = [init.sampling.grammar for plan in h.executor.plans for init in plan.new_rows]
    assert sorted(bound, key=str) == sorted([None, digest_of("g")], key=str)


def test_requests_with_one_grammar_share_it_and_find_it_again() -> None:
    h = rig()
    many = [request(name, 5, grammar="g", n=2) for name in "abc"]
    h.add(*many)
    h.run()
    again = request("d", 5, grammar="g")
    h.add(again)
    h.run()
    assert_as_expected(h, *many, again)
    assert h.executor.grammars.orders(CompileGrammar) == [digest_of("g")]


@pytest.mark.parametrize("choice", [None, 0])
def test_aborts_while_a_grammar_is_compiled(choice: int | None) -> None:
    """Of all choices, or of the one that the others follow."""
    h = rig()
    grammars(h, delay=5)
    h.add(request("a", 5, grammar="g", n=3))
    h.step()
    assert h.states("a") == [Blocker.GRAMMAR, Blocker.FORK, Blocker.FORK]
    h.engine.abort(Abort(request_id="a", attempt=0, choice=choice))
    check_invariants(h.engine)
    h.run()
    reasons = h.sink.ends["a"].finish_reasons
    assert reasons == ["abort"] * 3 if choice is None else ["abort", "length", "length"]
    assert len(h.executor.grammars.compiled) == 1, "it is kept for the next request"


def test_a_wrong_grammar_ends_its_requests_alone() -> None:
    h = rig()
    grammars(h, delay=3, refuses=Failure("content", "it has no start"))
    plain = request("c", 5)
    h.add(request("a", 5, grammar="g", n=2), request("b", 5, grammar="g"), plain)
    h.run()
    assert refused(h, "a") == refused(h, "b") == (400, "invalid_grammar")
    assert h.sink.ends["a"].refused is not None and "it has no start" in h.sink.ends["a"].refused[3]
    assert_as_expected(h, plain)
    with pytest.raises(RequestRefused, match="it has no start"):
        h.add(request("d", 5, grammar="g"))
    assert len(h.executor.grammars.sent) == 1, "it is not compiled again"
    assert h.engine.stats().rejected["grammar"] == 2


def test_a_rank_that_cannot_compile_is_no_fault_of_the_grammar() -> None:
    h = rig()
    grammars(h, refuses=Failure("internal", "/private/path is broken"))
    h.add(request("a", 5, grammar="g"))
    h.run()
    assert refused(h, "a") == (503, "service_unavailable")
    assert "private" not in str(h.sink.ends["a"].refused)
    grammars(h)
    again = request("b", 5, grammar="g")
    h.add(again)
    h.run()
    assert_as_expected(h, again)


def test_a_grammar_that_takes_too_long_ends_its_requests_and_holds_up_no_others() -> None:
    h = rig(grammar_timeout_s=2.0)
    first = request("first", 5, grammar="quick")
    h.add(first)
    h.run()  # the first one has more time
    grammars(h, delay=None)
    h.add(request("a", 5, grammar="slow"), request("b", 5, grammar="slow"), request("e", 5, grammar="slower"))
    h.step_s = 0.5
    for _ in range(12):
        h.step()
    assert {refused(h, name) for name in "abe"} == {(400, "invalid_grammar")}
    h.add(request("c", 5, grammar="slow"))
    h.step()
    assert refused(h, "c") == (400, "invalid_grammar"), "the same order is still out"
    h.executor.grammars.delay = lambda text: None if text == "slower" else 0
    other = request("d", 5, grammar="other")
    h.add(other)
    for _ in range(60):
        h.step()
    assert_as_expected(h, other)
    late = request("f", 5, grammar="slow")
    h.add(late)  # it has come after all
    for _ in range(60):
        h.step()
    assert_as_expected(h, first, late)


def test_a_preempted_row_keeps_its_grammar() -> None:
    """Too few blocks for both answers: one of them is preempted and computed again; nothing is dropped meanwhile."""
    h = rig(num_blocks=12, caching=False)
    h.engine.grammars._max_idle_bytes = 0
    many = [request(name, 6, 24, grammar=name) for name in "ab"]
    h.add(*many)
    while h.engine.stats().preemptions == 0:
        h.step()
        assert not h.executor.grammars.orders(DropGrammar)
    h.run()
    h.step()
    h.drain_transfers()
    assert_as_expected(h, *many)
    assert set(h.executor.grammars.orders(DropGrammar)) == {digest_of("a"), digest_of("b")}
    assert not h.executor.grammars.compiled


def test_what_nobody_uses_goes_when_there_is_no_room() -> None:
    """With room for two, nine requests with three grammars are answered, the least recently used idle one goes."""
    h = rig()
    h.engine.grammars._max_ready = 2
    many = [request(f"r{number}", 5, grammar=f"g{number % 3}") for number in range(9)]
    for number in range(0, 9, 3):
        h.add(*many[number : number + 3])
        h.run()
        assert len(h.executor.grammars.compiled) <= 2
    assert_as_expected(h, *many)


def test_the_tenant_that_was_served_least_is_next() -> None:
    h = rig(max_num_seqs=2)
    busy = request("busy", 20, 20, tenant="big")
    h.add(busy, request("x", 5, 2, tenant="small"))
    for _ in range(12):
        h.step()
    grammars(h, delay=2)
    flood = [request(f"f{number}", 5, 2, grammar=f"flood {number}", tenant="big") for number in range(6)]
    h.add(*flood, request("one", 5, 2, grammar="mine", tenant="small"))
    h.run()
    assert h.executor.grammars.orders(CompileGrammar).index(digest_of("mine")) == 0


def test_an_adapter_and_a_resumed_choice_go_together_with_a_grammar() -> None:
    h = rig(adapters=AdapterPlan(num_pages=2))
    grammars(h, delay=4)
    resumed: GenerationRequest = request("a", 6, 9, grammar="g", adapter="x", attempt=1, n=2, resume=[[5, 6], [7]])
    h.add(resumed)
    h.run()
    assert_as_expected(h, resumed)
    done = request("b", 6, 2, grammar="g2", attempt=1, resume=[[5, 6]])
    h.add(done)
    h.run()
    assert h.sink.ends["b"].finish_reasons == ["length"], "nothing is left to do"


def test_a_stop_token_ends_a_choice_with_a_grammar_before_min_tokens() -> None:
    """The ranks choose one there only if nothing else can follow."""
    h = rig()
    h.add(request("a", 5, 8, min_tokens=6, grammar="g", stop_token_ids=tuple(range(50))))
    seq = h.engine.requests.get("a").sequences[0]
    assert seq.min_len == seq.prompt_len
