"""Eviction order, by last use or by value; policies forget blocks that have left the tier."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.offload.kv.eviction import GreedyDual, LeastRecentlyUsed, make_policy


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


@given(steps=st.lists(st.tuples(st.sampled_from(["add", "remove", "victim"]), st.integers(0, 5)), max_size=60))
@settings(max_examples=150, deadline=None)
def test_lru_gives_out_the_key_that_was_used_longest_ago(steps):
    policy, order = LeastRecentlyUsed(), []
    for what, number in steps:
        if what == "add":
            policy.add(key(number), 1.0)
            order = [n for n in order if n != number] + [number]
        elif what == "remove" and number in order:
            policy.remove(key(number))
            order.remove(number)
        elif what == "victim":
            assert policy.victim() == (key(order.pop(0)) if order else None)
        assert len(policy) == len(order)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["add", "pin", "forget", "victim"]), st.integers(0, 5)), max_size=80),
    costs=st.lists(st.sampled_from([1.0, 1.5, 4.0]), min_size=6, max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_greedy_dual_gives_out_the_least_value(steps, costs):
    """Against a list: value = value of the last victim + uses x cost, ties by age."""
    policy, floor = GreedyDual(), 0.0
    values: dict[int, tuple[float, int]] = {}
    uses: dict[int, int] = {}
    pinned: set[int] = set()
    for tick, (what, number) in enumerate(steps):
        if what == "add":
            uses[number] = uses.get(number, 0) + 1
            values[number] = (floor + uses[number] * costs[number], tick)
            policy.add(key(number), costs[number])
            pinned.discard(number)
        elif what in ("pin", "forget") and number in values:
            policy.remove(key(number))
            del values[number]
            pinned.add(number)
            if what == "forget":
                policy.forget(key(number))
                pinned.remove(number)
                del uses[number]
        elif what == "victim":
            wanted = min(values, key=lambda n: values[n]) if values else None
            assert policy.victim() == (None if wanted is None else key(wanted))
            if wanted is not None:
                floor = values.pop(wanted)[0]
                del uses[wanted]
        assert len(policy) == len(values)


def test_greedy_dual_keeps_what_is_used_often_and_what_is_dear():
    policy = GreedyDual()
    for _ in range(3):
        policy.add(key(1), 1.0)
    policy.add(key(2), 2.5)
    policy.add(key(3), 1.0)
    policy.add(key(4), 1.0)
    assert [policy.victim() for _ in range(5)] == [key(3), key(4), key(2), key(1), None]


def test_greedy_dual_lets_go_of_what_was_often_used_long_ago():
    policy = GreedyDual()
    for _ in range(20):
        policy.add(key(0), 1.0)
    gone = []
    for number in range(1, 400):
        policy.add(key(number), 1.0)
        if len(policy) > 8:
            gone.append(policy.victim())
    assert key(0) in gone and gone.index(key(0)) > 20


@pytest.mark.parametrize("name", ["lru", "cost"])
def test_memory_follows_the_number_of_keys(name):
    """A tier of 16 blocks after 50,000 uses, pins, evictions and forgotten blocks."""
    policy, rng = make_policy(name), random.Random(3)
    there: list[bytes] = []
    for number in range(50_000):
        if len(there) < 16:
            there.append(key(number))
            policy.add(there[-1], rng.random())
            continue
        some = rng.choice(there)
        policy.remove(some)
        if rng.randrange(3):
            policy.add(some, rng.random())
        else:
            policy.forget(some)
            there.remove(some)
        if rng.randrange(4) == 0:
            victim = policy.victim()
            assert victim is not None
            there.remove(victim)
    sizes = [len(value) for value in vars(policy).values() if hasattr(value, "__len__")]
    assert max(sizes) <= 4 * 16 + 64 + 1, vars(policy).keys()
    assert all(len(value) <= 16 for value in vars(policy).values() if isinstance(value, dict))
