"""The queue between tenants by itself: what is charged, who is lifted to what, who is forgotten."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.workers.engine.waiting.fairness import FairQueue, TokenCosts

COSTS = TokenCosts(prompt=1.0, output=10.0, adapter_swap=100.0)


def seq_of(tenant: str, arrival: int = 0, num_tokens: int = 1) -> Any:
    class Waiting(SimpleNamespace):
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    return Waiting(tenant=tenant, order=(0, arrival, 0), bound_step=0, tokens=[1] * num_tokens)


def test_tokens_and_adapters_cost_what_the_table_says_over_the_weight():
    queue, seq = FairQueue(COSTS), seq_of("t")
    queue.set_weights({"t": 4.0})
    queue.charge(seq, prompt_tokens=3, output_tokens=2)
    assert queue.counter(seq) == (3 + 20) / 4
    queue.charge_swap(seq)
    assert queue.counter(seq) == (3 + 20 + 100) / 4
    assert queue.output_tokens() == {"t": 2}
    assert queue.drain_charges() == {"t": 123.0} and queue.drain_charges() == {}
    queue.charge(seq, output_tokens=1)
    assert queue.output_tokens() == {"t": 3} and queue.drain_charges() == {"t": 10.0}


def test_prompt_tokens_have_a_price_too():
    queue, seq = FairQueue(TokenCosts(prompt=0.5, output=3.0)), seq_of("t")
    queue.charge(seq, prompt_tokens=8, output_tokens=2)
    assert queue.counter(seq) == 4 + 6


def test_weights_hold_from_now_on_and_for_those_who_come_later():
    queue, known = FairQueue(COSTS), seq_of("known")
    queue.charge(known, prompt_tokens=8)
    queue.set_weights({"known": 2.0, "later": 4.0})
    queue.charge(known, prompt_tokens=8)
    queue.charge(later := seq_of("later"), prompt_tokens=8)
    assert (queue.counter(known), queue.counter(later)) == (8 + 4, 2)
    queue.set_weights({})
    queue.charge(known, prompt_tokens=8)
    queue.charge(later, prompt_tokens=8)
    assert (queue.counter(known), queue.counter(later)) == (8 + 4 + 8, 2 + 8)
    with pytest.raises(AssertionError):
        queue.set_weights({"known": 0.0})


def test_who_begins_to_wait_is_lifted_to_the_least_that_waits_once():
    queue = FairQueue(COSTS)
    queue.charge(one := seq_of("one"), prompt_tokens=50)
    queue.charge(two := seq_of("two"), prompt_tokens=30)
    queue.push(one)
    queue.push(two)
    queue.push(new := seq_of("new", 1))
    assert queue.counter(new) == 50, "to what the first had when the others came"
    queue.charge(one, prompt_tokens=5)
    queue.charge(two, prompt_tokens=5)
    queue.push(seq_of("new", 2))
    assert queue.counter(new) == 50, "it has been waiting"
    assert queue.peek() is new


def test_who_has_had_more_than_the_least_is_not_lowered():
    queue = FairQueue(COSTS)
    queue.charge(much := seq_of("much"), prompt_tokens=50)
    queue.push(seq_of("little"))
    queue.push(much)
    assert queue.counter(much) == 50


def test_the_level_is_that_of_who_left_last_when_nobody_waits():
    queue = FairQueue(COSTS)
    for tenant, cost in (("one", 70), ("two", 40)):
        queue.push(seq := seq_of(tenant))
        queue.charge(seq, prompt_tokens=cost)
        queue.remove(seq)
    level = queue.counter(seq_of("two"))
    queue.push(new := seq_of("new"))
    assert queue.counter(new) == level == 70 + 40, "two was lifted to one, and served"


def test_who_leaves_is_the_last_only_when_nothing_of_it_waits_any_more():
    queue = FairQueue(COSTS)
    queue.push(gone := seq_of("gone"))
    queue.charge(gone, prompt_tokens=10)
    queue.remove(gone)
    queue.block(stays := seq_of("stays", 1))
    queue.block(leaves := seq_of("stays", 2))
    queue.charge(stays, prompt_tokens=500)
    queue.remove(leaves)
    queue.push(new := seq_of("new"))
    assert queue.counter(new) == 10


def test_the_least_that_works_elsewhere_counts_as_one_that_waits():
    queue = FairQueue(COSTS)
    queue.merge_remote_charges({"there": 60.0, "idle": 0.0})
    queue.push(first := seq_of("first"))
    assert queue.counter(first) == 60
    queue.charge(first, prompt_tokens=40)
    queue.push(second := seq_of("second"))
    assert queue.counter(second) == 60, "the least of both"
    assert queue.counter(seq_of("there")) == 60 and queue.counter(seq_of("idle")) == 0


def test_who_begins_elsewhere_is_lifted_like_one_that_begins_here():
    queue = FairQueue(COSTS)
    queue.push(busy := seq_of("busy"))
    queue.charge(busy, prompt_tokens=100_000)
    queue.charge(seq_of("back"), prompt_tokens=20)
    for _ in range(2):
        queue.forget_idle(())
    queue.merge_remote_charges({"back": 10.0})
    queue.push(new := seq_of("new", 1))
    assert queue.counter(new) == 100_000, "it passes nobody"
    queue.charge(busy, prompt_tokens=500)
    queue.merge_remote_charges({"back": 10.0})
    assert queue.counter(seq_of("back")) == 100_020, "lifted once, while it goes on there"
    queue.merge_remote_charges({})
    queue.remove(new)
    queue.merge_remote_charges({"back": 10.0})
    assert queue.counter(seq_of("back")) == 100_510, "and again when it is back"


def test_charges_elsewhere_lift_nobody_who_waits_here():
    queue = FairQueue(COSTS)
    queue.push(seq_of("waits"))
    queue.push(busy := seq_of("busy"))
    queue.charge(busy, prompt_tokens=1000)
    queue.block(blocked := seq_of("waits", 1))
    queue.remove(blocked)
    queue.merge_remote_charges({"waits": 10.0})
    assert queue.counter(seq_of("waits")) == 10


def test_charges_elsewhere_are_divided_by_the_weight_and_not_told_on():
    queue = FairQueue(COSTS)
    queue.set_weights({"there": 2.0})
    queue.merge_remote_charges({"there": 60.0})
    assert queue.counter(seq_of("there")) == 30 and queue.drain_charges() == {}


def test_a_sequence_waits_once_in_the_queue_or_aside():
    queue = FairQueue(COSTS)
    seq = seq_of("t", num_tokens=7)
    queue.push(seq)
    assert (len(queue), queue.num_tokens) == (1, 7)
    seq.tokens.append(2)
    queue.block(seq)
    assert (len(queue), queue.num_tokens, queue.peek()) == (0, 0, None)
    queue.check_invariants()
    queue.push(seq)
    assert (len(queue), queue.num_tokens, queue.peek()) == (1, 8, seq)
    queue.check_invariants()
    queue.remove(seq)
    assert (len(queue), queue.num_tokens, queue.peek()) == (0, 0, None)
    queue.check_invariants()


def test_the_order_is_contested_when_two_tenants_queue():
    queue = FairQueue(COSTS)
    queue.push(first := seq_of("one", 1))
    queue.push(seq_of("one", 2))
    assert not queue.has_competing_tenants
    queue.push(seq_of("two", 3))
    assert queue.has_competing_tenants
    queue.charge(first, prompt_tokens=1)
    assert queue.peek().tenant == "two", "who was listed before with less comes later now"


def test_a_tenant_is_forgotten_when_it_did_nothing_between_two_calls_and_nothing_of_it_is_there():
    queue = FairQueue(COSTS)
    names = ("charged", "waiting", "running", "idle")
    seqs = {name: seq_of(name) for name in names}
    for seq in seqs.values():
        queue.push(seq)
        queue.charge(seq, prompt_tokens=5)
    for name in ("charged", "running", "idle"):
        queue.remove(seqs[name])
    assert queue.forget_idle({"running"}) == [], "they have all done something"
    queue.charge(seqs["charged"], prompt_tokens=1)
    assert queue.forget_idle({"running"}) == ["idle"]
    queue.check_invariants()
    assert set(queue.output_tokens()) == {"charged", "waiting", "running"}
    queue.push(back := seq_of("idle", 9))
    assert queue.counter(back) == queue.counter(seqs["waiting"]) > 0, "lifted to the least counter of those that wait"
    assert queue.peek() is seqs["waiting"]
    queue.check_invariants()


def test_entries_of_tenants_that_left_the_queue_do_not_pile_up_behind_one_that_waits():
    queue = FairQueue(COSTS)
    queue.push(seq_of("always"))
    for number in range(10_000):
        queue.charge(seq := seq_of(f"t{number}"), prompt_tokens=1)
        queue.push(seq)
        queue.remove(seq)
        if number % 500 == 499:
            queue.forget_idle(())
            queue.check_invariants()
            assert len(queue._tenants) <= 1001 and len(queue._heap) <= 1001
    assert queue.peek().tenant == "always"
