"""Fairness between tenants: shares and waits in simulated time, and the queue's order against a plain model."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from builders import Harness, assert_as_expected, harness, request
from fake_adapters import AdapterPlan
from test_engine_outputs import MODES

from tandem.workers.engine.live_requests import TENANT_IDLE_S
from tandem.workers.engine.waiting.arrival_queue import ArrivalQueue
from tandem.workers.engine.waiting.fairness import FairQueue, TokenCosts
from tandem.workers.messages.errors import QueueFull

ROWS = 8
BUDGET = 32


class Blind(FairQueue):
    """Arrival order whatever tenants have had: the invariants below must notice it."""

    def charge(self, seq: Any, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        pass

    def push(self, seq: Any) -> None:
        super().push(seq)
        self._arrivals = getattr(self, "_arrivals", ArrivalQueue())
        self._arrivals.push(seq)

    def remove(self, seq: Any) -> None:
        super().remove(seq)
        self._arrivals.remove(seq)

    def peek(self) -> Any:
        return self._arrivals.peek()


def serving(queue: type[FairQueue] = FairQueue, **options: Any) -> Harness:
    """Prompts of 32 tokens in a step, room for all blocks that rows can want."""
    with mock.patch("tandem.workers.engine.waiting.waiting_queue.FairQueue", queue):
        made = harness(
            **{"num_blocks": 400, "max_num_seqs": ROWS, "max_num_queued_reqs": 100_000, "caching": False, **options}
        )
    made.look_every = 10
    return made


def keep_waiting(h: Harness, tenant: str, most: int, numbers: Iterator[int], **options: Any) -> None:
    """Fills up what waits of a tenant."""
    stats = h.engine.stats().tenants.get(tenant)
    for _ in range(most - (0 if stats is None else stats.waiting)):
        h.add(request(f"{tenant}{next(numbers)}", 8, 12, tenant=tenant, **options))


def work_of(h: Harness) -> dict[str, int]:
    """Tokens computed for each tenant so far."""
    return {name: t.prompt_tokens + 2 * t.generation_tokens for name, t in h.engine.stats().tenants.items()}


def compete(h: Harness, *tenants: str, steps: int, numbers: Iterator[int]) -> dict[str, int]:
    """All of them have more to do than there is room for; what each got in these steps. No row is ever idle."""
    before = work_of(h)
    for tenant in tenants:
        keep_waiting(h, tenant, 20, numbers)
    for i in range(steps):
        h.step()
        for tenant in tenants:
            keep_waiting(h, tenant, 20, numbers)
        if i and h.executor.most_in_flight == 1:
            work = h.executor.plans[-1].work
            num_tokens = sum(row.num_tokens + row.max_drafts for row in work)
            assert len(work) == ROWS or num_tokens == BUDGET, "a row idles though work waits"
    after = work_of(h)
    return {tenant: after[tenant] - before.get(tenant, 0) for tenant in tenants}


def first_token_waits(
    queue: type[FairQueue], mode: dict[str, Any], loud_per_quiet: int, max_queued: int = 100_000
) -> list[float]:
    """Seconds to the first token of a quiet tenant's long prompts, one each 0.6 s (less than half of what there is),
    beside one that sends so many requests to each of them, of which the queue takes what it may."""
    stages = mode.get("stages", 1)
    rows = 32 * stages
    room = {"max_model_len": 1000, "num_blocks": 500 + 500 * stages, "max_num_queued_reqs": max_queued}
    h = serving(queue, **mode, max_num_seqs=rows, max_num_batched_tokens=160, **room)
    began_s: dict[str, float] = {}
    waits: dict[str, float] = {}
    for i in range(720):
        if i % 60 == 0:
            with suppress(QueueFull):
                h.add(*(request(f"loud{i}-{j}", 8, 5 + 37 * j % 50, tenant="loud") for j in range(loud_per_quiet)))
            name = f"quiet{i}"
            h.add(request(name, 600, 4, tenant="quiet"))
            began_s[name] = h.clock.now_s
        h.step()
        for name, since_s in began_s.items():
            if name not in waits and h.sink.tokens.get((name, 0)):
                waits[name] = h.clock.now_s - since_s
    return sorted(waits.get(name, 99.0) for name in began_s if int(name[5:]) < 640)


def p95(values: list[float]) -> float:
    return values[int(0.95 * len(values))]


DEEP, SHORT = 100_000, 40
"""What may wait: the whole flood, or a third of what one quiet request has beside it."""


@pytest.mark.parametrize(
    ("mode", "max_queued"),
    [pytest.param(*mode.values, most, id=f"{mode.id} {most}") for mode, most in zip(MODES, cycle([DEEP, SHORT]))]
    + [pytest.param(*MODES[0].values, SHORT, id=f"depth1 {SHORT}")],
)
def test_tn_06_a_flood_leaves_the_other_tenant_its_first_tokens(mode, max_queued):
    """The flood: 120 requests to one, twice of what rows can take."""
    solo, beside = first_token_waits(FairQueue, mode, 0), first_token_waits(FairQueue, mode, 120, max_queued)
    times = 3 if {"stages", "drafts"} & set(mode) else 2  # a row is free some steps later; drafts have half a step
    assert p95(beside) <= times * p95(solo), (p95(solo), p95(beside))


def test_arrival_order_would_not_withstand_the_flood():
    assert p95(first_token_waits(Blind, {}, 120)) > 1.0


@pytest.mark.parametrize(
    ("mode", "weight"),
    [pytest.param(*mode.values, 4.0, id=f"{mode.id} 4.0") for mode in MODES]
    + [pytest.param(*MODES[1].values, weight, id=f"async {weight}") for weight in (1.0, 2.0)],
)
def test_weights_give_shares(mode, weight):
    h, numbers = serving(**mode), iter(range(10**6))
    h.engine.set_weights({"heavy": weight})
    share = compete(h, "heavy", "light", steps=600, numbers=numbers)
    assert share["heavy"] / share["light"] == pytest.approx(weight, rel=0.1)


def test_idling_earns_nothing():
    h, numbers = serving(), iter(range(10**6))
    h.add(request("first", 8, 4, tenant="idle"))
    compete(h, "busy", steps=400, numbers=numbers)
    share = compete(h, "busy", "idle", steps=300, numbers=numbers)
    assert share["idle"] / share["busy"] == pytest.approx(1.0, rel=0.15)


def test_a_tenant_that_comes_when_nobody_waits_has_no_credit_either():
    h, numbers = serving(), iter(range(10**6))
    compete(h, "busy", steps=300, numbers=numbers)
    h.run()
    share = compete(h, "busy", "new", steps=300, numbers=numbers)
    assert share["new"] / share["busy"] == pytest.approx(1.0, rel=0.15)


def test_long_answers_cost_what_they_take():
    h, numbers = serving(), iter(range(10**6))
    before: dict[str, int] = {}
    for i in range(1200):
        keep_waiting(h, "short", 20, numbers)
        stats = h.engine.stats().tenants.get("long")
        if stats is None or stats.waiting < 20:
            h.add(*(request(f"long{i}-{j}", 8, 60, tenant="long") for j in range(20)))
        h.step()
        if i == 200:
            before = work_of(h)
    share = {name: work - before[name] for name, work in work_of(h).items()}
    assert share["long"] / share["short"] == pytest.approx(1.0, rel=0.15)


def test_a_tenant_of_two_groups_is_charged_once():
    groups, numbers = [serving(), serving()], iter(range(10**6))
    for i in range(600):
        for h, other in (groups, groups[::-1]):
            keep_waiting(h, "both", 20, numbers)
            h.step()
            if i % 20 == 0:
                other.engine.merge_remote_charges(h.engine.drain_charges())
        keep_waiting(groups[0], "one", 20, numbers)
    work = [work_of(h) for h in groups]
    everywhere, here = work[0]["both"] + work[1]["both"], work[0]["one"]
    assert here / everywhere > 0.8, "the other group's work counts here"
    assert work[1]["both"] > 0.9 * here, "and nothing idles there"


def test_remote_charges_of_a_tenant_that_was_alone_give_an_idle_one_no_credit():
    here, there, numbers = serving(), serving(), iter(range(10**6))
    for i in range(400):
        keep_waiting(there, "busy", 20, numbers)
        there.step()
        if i % 20 == 0:
            here.engine.merge_remote_charges(there.engine.drain_charges())
    share = compete(here, "new", "busy", steps=400, numbers=numbers)
    assert share["new"] / share["busy"] == pytest.approx(1.0, rel=0.15)


def test_a_tenant_that_became_idle_in_other_groups_lifts_no_other():
    queue = FairQueue()
    queue.merge_remote_charges({"there": 1000.0})
    queue.merge_remote_charges({})
    queue.push(first := seq_of("here", 0, 1))
    assert queue.counter(first) == 0.0


def test_charges_are_uncached_prompt_and_output_tokens():
    h = serving(caching=True)
    h.add(request("a", [3 + i for i in range(16)], 5, tenant="t"))
    h.run()
    assert h.engine.drain_charges() == {"t": 16 + 2 * 5} and h.engine.drain_charges() == {}
    h.add(request("b", [3 + i for i in range(16)], 5, tenant="t", n=2))
    while h.engine.has_work():
        h.step()
        if h.sink.tokens.get(("b", 0)):
            break
    running = h.engine.drain_charges()["t"]
    assert running >= 4 + 2
    h.run()
    assert running + h.engine.drain_charges()["t"] == (16 - 12) + 1 + 2 * 2 * 5, "12 tokens found, the last shared"


def test_bringing_an_adapter_is_charged_to_whom_it_was_brought_for():
    h = serving(adapters=AdapterPlan(num_pages=2), patience=200)
    h.add(request("a", 8, 4, tenant="t", adapter="x"), request("b", 8, 4, tenant="u"))
    h.run()
    swap = TokenCosts().adapter_swap
    assert h.engine.drain_charges() == {"t": 8 + 8 + swap, "u": 8 + 8}


def test_a_tenant_with_many_adapters_does_not_stand_before_one_with_few():
    h = serving(adapters=AdapterPlan(num_pages=4), patience=400)
    h.add(*(request(f"loud{i}", 4, 30, tenant="loud", adapter=f"a{i}") for i in range(40)))
    for _ in range(60):
        h.step()
    h.add(request("quiet", 4, 4, tenant="quiet", adapter="q"))
    h.run()
    assert list(h.sink.ends).index("quiet") < 10


@pytest.mark.parametrize("mode", MODES[:2])
def test_who_has_had_most_loses_its_blocks_first(mode):
    """Two thirds of the blocks that rows could want: in a flood the other tenant's answers still come through."""
    h = serving(**mode, num_blocks=100, max_num_seqs=16, max_num_batched_tokens=64)
    began, took = {}, {}
    for i in range(1000):
        if i % 6 == 0:
            h.add(*(request(f"loud{i}-{j}", 8, 60, tenant="loud") for j in range(3)))
        if i % 40 == 0:
            h.add(request(f"quiet{i}", 8, 60, tenant="quiet"))
            began[f"quiet{i}"] = i
        h.step()
        took.update({name: i - began[name] for name in began if name in h.sink.ends and name not in took})
    assert h.engine.stats().preemptions > 100 and len(took) > 20
    assert sorted(took.values())[len(took) // 2] < 100, "60 steps alone"


@pytest.mark.parametrize(("tenant", "victim"), [("modest", "early"), ("greedy", "late")])
def test_a_priority_keeps_blocks_from_no_other_tenant(tenant, victim):
    """18 blocks for two answers of 10: who has had most gives way however early its priority; within a tenant it
    decides."""
    h = serving(num_blocks=18, max_num_seqs=2)
    h.engine.set_weights({"modest": 4.0})
    h.add(request("early", 8, 32, tenant="greedy", priority=-5), request("late", 8, 32, tenant=tenant))
    while not h.engine.stats().preemptions:
        h.step()
    waiting = [seq.state.request.request_id for seq in [h.engine.scheduler.waiting.peek()] if seq is not None]
    assert waiting == [victim]
    h.run()


@pytest.mark.parametrize("mode", MODES)
def test_outputs_do_not_depend_on_the_order_of_tenants(mode):
    h = serving(**mode, num_blocks=24, caching=True)
    requests = [request(f"r{i}", 4 + i % 7, 20, tenant="abc"[i % 3], priority=i % 2) for i in range(24)]
    for req in requests:
        h.add(req)
        h.step()
    h.run()
    assert h.engine.stats().preemptions > 0
    assert_as_expected(h, *requests)


def test_numbers_by_tenant():
    h = serving(max_num_seqs=1)
    h.add(request("a", 9, 5, tenant="t"), request("b", 6, 3, tenant="u"), request("c", 6, 3, tenant="u"))
    h.step()
    assert h.engine.stats().tenants["u"].waiting == 2 and h.engine.stats().tenants["t"].waiting == 0
    h.step()
    assert h.engine.stats().tenants["t"].generation_tokens == len(h.sink.tokens["a", 0]) == 2, "while it runs, too"
    h.run()
    stats = h.engine.stats().tenants
    assert (stats["t"].prompt_tokens, stats["t"].generation_tokens, stats["t"].queued_requests) == (9, 5, 1)
    assert (stats["u"].prompt_tokens, stats["u"].generation_tokens, stats["u"].waiting) == (12, 6, 0)
    assert stats["u"].queue_s > stats["t"].queue_s > 0


# ---- the queue alone ----


def seq_of(tenant: str, priority: int, arrival: int, bound_step: int = 0) -> Any:
    class Waiting(SimpleNamespace):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    return Waiting(tenant=tenant, order=(priority, arrival, 0), bound_step=bound_step, tokens=[1] * arrival)


def place(seq: Any) -> tuple[int, bool, int]:
    return seq.order[0], not seq.bound_step, seq.order[1]


def test_what_has_run_leads_its_priority():
    queue = FairQueue()
    for seq in (seq_of("t", 0, 1), seq_of("t", 0, 2, bound_step=7), seq_of("t", -1, 3)):
        queue.push(seq)
    order = []
    while (seq := queue.peek()) is not None:
        queue.remove(seq)
        order.append(seq.order[1])
    assert order == [3, 2, 1]


@pytest.mark.parametrize("tenants", ["t", "tu", "tuvwxyz"])
@pytest.mark.parametrize("seed", range(4))
def test_the_queue_against_a_plain_model(tenants: str, seed: int):
    """The first is always one of a tenant with the least counter, and the first of that tenant."""
    draw, queue = random.Random(seed), FairQueue()
    queued: list[Any] = []
    blocked: list[Any] = []

    def move(seq: Any, source: list[Any], target: list[Any] | None, command: Callable[[Any], None]) -> None:
        command(seq)
        source.remove(seq)
        if target is not None:
            target.append(seq)

    for arrival in range(4000):
        action = draw.random()
        if action < 0.35:
            seq = seq_of(draw.choice(tenants), draw.randrange(2), arrival)
            target = queued if draw.random() < 0.8 else blocked
            (queue.push if target is queued else queue.block)(seq)
            target.append(seq)
        elif action < 0.6 and queued:
            seq = queue.peek()
            move(seq, queued, None, queue.remove)
            queue.charge(seq, draw.randrange(50), draw.randrange(20))
        elif action < 0.7 and queued:
            move(draw.choice(queued), queued, draw.choice([None, blocked]), draw.choice([queue.block]))
            if len(blocked) + len(queued) != sum(t.waiting for t in queue._tenants.values()):
                left = next(s for s in queue._waiting if not queue.is_queued(s) and s not in blocked)
                queue.remove(left)
        elif action < 0.85 and blocked:
            move(draw.choice(blocked), blocked, queued, queue.push)
        elif blocked:
            move(draw.choice(blocked), blocked, None, queue.remove)
        queue.check_invariants()
        assert len(queue) == len(queued)
        assert queue.num_tokens == sum(len(seq.tokens) for seq in queued)
        if not queued:
            assert queue.peek() is None
            continue
        counters = {seq.tenant: queue.counter(seq) for seq in queued}
        first = queue.peek()
        assert counters[first.tenant] == min(counters.values())
        assert first is min((seq for seq in queued if seq.tenant == first.tenant), key=place)


def test_thousands_of_tenants_come_and_go_and_few_are_kept() -> None:
    h = serving()
    for number in range(4000):
        h.add(request(f"r{number}", 8, 1, tenant=f"t{number}"))
        h.clock.now_s += 2.0
        if number % 50 == 49:
            h.run()
    per_idle_time = 2 * TENANT_IDLE_S / 2.0
    stats, queue = h.engine.stats().tenants, h.engine.scheduler.waiting.tenants
    assert per_idle_time / 2 - 2 <= len(stats) <= per_idle_time + 2, "idle for this long, or twice that"
    assert len(h.engine.collector.tenants) <= per_idle_time + 2 and len(queue._tenants) <= per_idle_time + 2
    assert "t3999" in stats and stats["t3999"].generation_tokens == 1


def test_known_tenants_with_rare_requests_keep_their_counts_and_removed_ones_do_not() -> None:
    h = serving()
    h.engine.set_weights({"rare": 1.0})
    counts = []
    for number in range(3):
        for tenant in ("rare", "removed", "default"):
            h.add(request(f"{tenant}{number}", 8, 1, tenant=tenant))
        h.run()
        stats = h.engine.stats().tenants
        counts.append([stats[tenant].queued_requests for tenant in ("rare", "removed", "default")])
        assert all(stats[tenant].generation_tokens == stats[tenant].queued_requests for tenant in stats)
        for _ in range(3):
            h.clock.now_s += TENANT_IDLE_S
            h.engine.merge_remote_charges({})
    assert counts == [[1, 1, 1], [2, 1, 2], [3, 1, 3]]
    h.engine.set_weights({})
    h.clock.now_s += TENANT_IDLE_S
    h.engine.merge_remote_charges({})
    assert set(h.engine.stats().tenants) == {"default"}


def test_a_tenant_whose_request_takes_longer_than_idleness_keeps_its_counts() -> None:
    h = serving()
    h.add(request("long", 8, 50, tenant="slow"))
    for number in range(12):
        h.step()
        h.clock.now_s += TENANT_IDLE_S / 3
        h.add(request(f"r{number}", 8, 1, tenant=f"t{number}"))
    assert h.engine.stats().tenants["slow"].generation_tokens == len(h.sink.tokens["long", 0]) > 5
    h.run()
