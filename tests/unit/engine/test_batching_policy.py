"""Static and dynamic batching: who is in a batch, when it begins, and that everybody ends, whatever else happens."""

from typing import Any

import pytest
from adapter_machine import MODES, machine
from builders import Harness, assert_as_expected, harness, request
from fake_adapters import AdapterPlan
from fake_tiers import TierPlan
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tandem.workers.engine.base.blockers import Blocker
from tandem.workers.messages.request import Abort, GenerationRequest

POLICIES = ("static", "dynamic")


class Batches:
    """Notes who is in which batch, and asserts the law of one: nobody joins who came after it began, or when one of it
    has ended; and, as more than the rows may not run, choices are at most rows."""

    def __init__(self, h: Harness, num_rows: int) -> None:
        self.batches: list[list[str]] = []
        self.began_s = 0.0
        self.arrived_s: dict[str, float] = {}
        self._h = h
        self._num_rows = num_rows
        self._choices = 0
        on_begun = h.engine.requests._on_begun

        def noted(req: GenerationRequest, cached_tokens: int) -> None:
            on_begun(req, cached_tokens)
            self._join(req)

        h.engine.requests._on_begun = noted

    def add(self, *requests: GenerationRequest) -> None:
        for one in requests:
            self.arrived_s[one.request_id] = self._h.clock.now_s
        self._h.add(*requests)

    def _join(self, req: GenerationRequest) -> None:
        ends = self._h.sink.ends
        last = self.batches[-1] if self.batches else []
        if all(name in ends or self._h.engine.requests.get(name) is None for name in last):
            self.batches.append([req.request_id])
            self.began_s = self._h.clock.now_s
            self._choices = req.sampling.n
            return
        last.append(req.request_id)
        self._choices += req.sampling.n
        assert self.arrived_s[req.request_id] <= self.began_s, "it came after the batch had begun"
        assert self._choices <= self._num_rows, "more choices than rows"


def batched(policy: str, rows: int = 4, **more: Any) -> tuple[Harness, Batches]:
    h = harness(batching_policy=policy, max_num_seqs=rows, num_blocks=400, patience=100, **more)
    return h, Batches(h, rows)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_batch_is_over_before_the_next_one_begins(policy: str, mode: dict[str, Any]) -> None:
    h, of = batched(policy, **mode)
    requests = [request(f"r{i}", 3 + i, 2 + 5 * (i % 3)) for i in range(10)]
    of.add(*requests)
    h.run()
    assert of.batches == [["r0", "r1", "r2", "r3"], ["r4", "r5", "r6", "r7"], ["r8", "r9"]]
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_joins_a_batch_that_runs(policy: str) -> None:
    h, of = batched(policy, batching_max_delay_ms=10.0)
    of.add(request("long", 3, 30), request("short", 3, 2))
    for _ in range(5):
        h.step()
    of.add(request("late", 3, 2))
    while "long" not in h.sink.ends:
        h.step()
        if h.engine.requests.get("long") is not None:
            assert h.states("late") == [Blocker.BATCH], "two rows are free"
    h.run()
    assert of.batches == [["long", "short"], ["late"]]


def test_continuous_batching_lets_it_join() -> None:
    h = harness(batching_policy="continuous")
    h.add(request("long", 3, 30))
    h.step()
    h.add(request("late", 3, 2))
    h.run()
    assert list(h.sink.ends) == ["late", "long"]


def test_static_begins_with_whoever_waits_and_dynamic_waits_for_more() -> None:
    h, of = batched("static")
    of.add(request("a", 3, 2))
    h.step()
    assert of.batches == [["a"]]
    h, of = batched("dynamic", batching_max_delay_ms=100.0)
    arrived_s = h.clock.now_s
    of.add(request("a", 3, 2))
    while not of.batches:
        h.step()
        if len(of.arrived_s) == 1 and h.clock.now_s > arrived_s + 0.04:
            of.add(request("b", 3, 2))
    assert of.batches == [["a", "b"]]
    assert h.clock.now_s == pytest.approx(arrived_s + 0.1, abs=0.011), (
        "the oldest has waited so long, by steps of 10 ms"
    )
    h.run()


def test_a_full_dynamic_batch_begins_at_once() -> None:
    h, of = batched("dynamic", batching_max_delay_ms=10_000.0)
    of.add(request("a", 3, 2), request("pair", 3, 2, n=2))
    for _ in range(3):
        h.step()
    assert not of.batches, "three of four choices"
    of.add(request("b", 3, 2))
    h.step()
    h.step()
    assert of.batches == [["a", "pair", "b"]]
    h.run()


def test_more_choices_than_rows_are_a_batch_by_themselves() -> None:
    h, of = batched("static", rows=3)
    requests = [request("a", 3, 4), request("many", 3, 4, n=5), request("b", 3, 4)]
    of.add(*requests)
    h.run()
    assert of.batches == [["a"], ["many"], ["b"]]
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_preempted_come_back_into_their_batch_past_those_that_wait(policy: str) -> None:
    h = harness(batching_policy=policy, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=64, patience=100)
    of = Batches(h, 3)
    requests = [request("a", 8, 20), request("b", 8, 20, priority=1), request("c", 8, 20)]
    of.add(*requests)
    h.step()
    late = request("urgent", 8, 2, priority=-5)
    of.add(late)
    h.run()
    assert h.engine.stats().preemptions > 0
    assert of.batches[-1] == ["urgent"] and len(of.batches) >= 2
    assert_as_expected(h, *requests, late)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_deadline_passes_while_another_batch_runs(policy: str) -> None:
    h, of = batched(policy, batching_max_delay_ms=10.0)
    of.add(request("long", 3, 40))
    h.step()
    h.step()
    of.add(request("late", 3, 2, deadline_s=0.05))
    h.run()
    assert h.sink.ends["late"].refused is not None and h.sink.ends["late"].refused[0] == 503
    assert h.sink.ends["long"].refused is None


@pytest.mark.parametrize("policy", POLICIES)
def test_suspects_run_alone_within_their_batch(policy: str) -> None:
    h, of = batched(policy, batching_max_delay_ms=10.0)
    requests = [request(f"s{i}", 3, 12, suspect=True) for i in range(3)] + [request("r", 3, 12)]
    of.add(*requests)
    h.run()
    assert_as_expected(h, *requests)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_adapters_than_max_loras_take_turns_within_their_batch(policy: str) -> None:
    h, of = batched(policy, adapters=AdapterPlan(num_pages=20, max_loras=1), batching_max_delay_ms=10.0)
    requests = [request(f"{adapter}{i}", 4, 6, adapter=adapter) for i in range(2) for adapter in "abc"]
    of.add(*requests, request("base", 4, 6))
    h.run()
    assert_as_expected(h, *requests)


class BatchingMachine(machine()):  # type: ignore[misc]
    """The machine of adapters under a batching policy, with suspects: everybody ends with the right tokens."""

    @initialize(
        mode=st.sampled_from(MODES),
        policy=st.sampled_from(POLICIES),
        delay_ms=st.sampled_from([1.0, 60.0, 1500.0]),
        num_pages=st.integers(2, 6),
        max_loras=st.integers(1, 3),
        num_blocks=st.integers(8, 30),
        rows=st.integers(1, 5),
        host_slots=st.sampled_from([0, 0, 6, 40]),
    )
    def build(
        self,
        mode: dict[str, Any],
        policy: str,
        delay_ms: float,
        num_blocks: int,
        rows: int,
        host_slots: int,
        **plan: int,
    ) -> None:
        self.slow: dict[tuple[int, int], int] = {}
        self.held: set[str] = set()
        self.broken: set[str] = set()
        self.ever_broken: set[str] = set()
        self.h = harness(
            **mode,
            batching_policy=policy,
            batching_max_delay_ms=delay_ms,
            num_blocks=num_blocks,
            max_num_seqs=rows,
            patience=700,
            tiers=TierPlan(host_slots=host_slots) if host_slots else None,
            adapters=AdapterPlan(
                pages=lambda digest, rank: 2 if digest == "f" else 1, refuses=self.refuses, delay=self.delay, **plan
            ),
        )
        self.law = Batches(self.h, rows if rows > 1 else 10**6)  # one row: an n of 3 is a batch of its own
        add = self.h.add

        def noted(*requests: GenerationRequest) -> None:
            for one in requests:
                self.law.arrived_s[one.request_id] = self.h.clock.now_s
            add(*requests)

        self.h.add = noted  # type: ignore[method-assign]
        self.requests: dict[str, GenerationRequest] = {}

    @rule(prompt_len=st.integers(1, 12), max_tokens=st.integers(1, 14), n=st.sampled_from([1, 1, 2]))
    def suspect_arrives(self, prompt_len: int, max_tokens: int, n: int) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = request(name, prompt_len, max_tokens, n=n, suspect=True)
        with self.noting_failure():
            self.h.add(self.requests[name])

    @precondition(lambda self: self.live)
    @rule()
    def give_up_the_first(self) -> None:
        with self.noting_failure():
            self.h.engine.abort(Abort(request_id=self.live[0].request_id, attempt=0))


TestBatchingPolicies = BatchingMachine.TestCase
TestBatchingPolicies.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_a_batch_whose_waiting_block_those_that_come_back_is_caught() -> None:
    """Without blocking those that must wait, one of them at the head keeps the preempted out for ever."""
    h = harness(batching_policy="static", num_blocks=9, max_num_seqs=3, max_num_batched_tokens=64)
    asked = 0

    def asks_for_ever(seq: Any, until: Any, rule: Any) -> None:
        nonlocal asked
        asked += 1
        if asked > 1000:
            raise AssertionError("nobody can run")

    h.engine.scheduler.admission._block = asks_for_ever
    h.add(request("a", 8, 20), request("b", 8, 20, priority=1), request("c", 8, 20))
    h.step()
    h.add(request("urgent", 8, 2, priority=-5))
    with pytest.raises(AssertionError, match="nobody can run"):
        h.run()
