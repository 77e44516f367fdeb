"""Policies on loads of a whole fleet: toy groups, two gateways with late news of each other (`make bench-routes`)."""

import random
from functools import cache

import pytest

from benchmarks.service.route_loads import LOADS, flooding_tenant
from benchmarks.service.route_replay import endless_hit_rate, faster, measure
from benchmarks.service.toy_fleet import Asked, Fleet, Replay, ToyGroup
from benchmarks.service.trace_replay.trace import generate_trace

ROOMY = Fleet(groups=8, blocks=4000, rate=12_000.0)
"""Groups with room for the KV of all conversations that go on."""


@cache
def requests(load: str) -> list[Asked]:
    """A load at some 60 % of what the fleet computes."""
    return faster(LOADS[load](generate_trace(400), random.Random(1)), 0.5 if load == "flood" else 1.3)


@cache
def figures(load: str, policy: str) -> dict[str, float]:
    found = measure(policy, ROOMY, requests(load))
    print(load, policy, {name: value for name, value in found.items() if name != "cpu_s"})
    return found


def test_joint_finds_conversations_again() -> None:
    joint, alone = figures("conversations", "joint"), figures("conversations", "least-tokens")
    assert joint["hit_rate"] >= 2.3 * alone["hit_rate"] and joint["first_p50_s"] <= 0.8 * alone["first_p50_s"]
    assert joint["hit_rate"] <= endless_hit_rate(requests("conversations")), "no more than there is to find"
    assert joint["spread"] < 1.3, "and no group is left behind"


@pytest.mark.parametrize("load", list(LOADS))
def test_joint_is_at_most_a_little_behind_any_other(load: str) -> None:
    others = [figures(load, policy) for policy in ("least-tokens", "adapter", "p2c", "session")]
    joint = figures(load, "joint")
    assert joint["first_p50_s"] <= 1.05 * min(other["first_p50_s"] for other in others) + 0.005
    assert joint["hit_rate"] >= 0.95 * max(other["hit_rate"] for other in others)


def test_with_adapters_joint_loads_as_few_as_the_policy_for_them() -> None:
    assert figures("adapters", "joint")["loads"] <= 1.1 * figures("adapters", "adapter")["loads"]
    assert figures("adapters", "joint")["loads"] < 0.5 * figures("adapters", "least-tokens")["loads"]


def test_a_flood_takes_no_conversation_from_its_home() -> None:
    """Hit rates and first tokens here are of its victims."""
    rows = generate_trace(400)
    quiet = [one for one in flooding_tenant(rows, random.Random(1)) if one.tenant != "flood"]
    alone = measure("joint", ROOMY, faster(quiet, 0.5))
    assert figures("flood", "joint")["hit_rate"] >= 0.9 * alone["hit_rate"]


def test_the_same_seed_gives_the_same_figures() -> None:
    few = requests("conversations")[:300]
    first, second = (Replay("p2c", ROOMY, few, seed=3).run() for _ in range(2))
    assert first.first_s == second.first_s and first.sent == second.sent
    assert Replay("p2c", ROOMY, few, seed=4).run().sent != first.sent


def test_a_toy_pool_forgets_what_was_used_least_recently_to_the_pool_below() -> None:
    group = ToyGroup("g", Fleet(groups=1, blocks=4, rate=1.0, below=2))
    group.store([1, 2, 3])
    assert group.holds([1, 2, 3, 4], 2000) == (1536, 0) and group.holds([1, 2, 3], 1536) == (1535, 0)
    group.store([7, 8])
    assert group.holds([1, 2, 3], 2000) == (1024, 512), "the end of a prompt goes first"
    group.store([9, 10])
    assert group.holds([1, 2, 3], 2000) == (0, 1024), "and the oldest below"
