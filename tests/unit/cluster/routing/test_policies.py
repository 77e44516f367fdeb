"""Routing policies by name: what each one's costs hold whatever the loads are, and what joint weighs against what."""

import random
from collections import Counter
from itertools import pairwise
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tandem.cluster.routing.group_loads import UNMEASURED_COPY_SHARE, GroupLoads
from tandem.cluster.routing.policies.adapter_affinity import MISS_REQUESTS, MISS_TOKENS
from tandem.cluster.routing.policies.joint import HOME_REQUESTS, Joint
from tandem.cluster.routing.policies.policy_names import DEFAULT_POLICY, POLICIES, policy_by_name
from tandem.cluster.routing.policies.routing_policy import FEW, choose
from tandem.cluster.routing.residency import Tier
from tandem.cluster.routing.route_hint import RouteHint
from tandem.configs.schema import RoutingPolicyName

NAMES = list(POLICIES)
TOKENS = st.integers(0, 200_000)


def loads(outstanding: list[int], **more: Any) -> GroupLoads:
    """Groups g0, g1, ..; nothing is of this tenant unless `own` says so."""
    names = [f"g{i}" for i in range(len(outstanding))]
    own = np.array(more.pop("own", [0] * len(names)))
    return GroupLoads(groups=names, outstanding=np.array(outstanding), own=own, **more)


def hint(cost: int = 1000, **more: Any) -> RouteHint:
    return RouteHint(request_id="r", cost_tokens=cost, **more)


def first(policy: Any, groups: GroupLoads, request: RouteHint) -> str:
    return groups.groups[choose(policy, groups, request, lambda near: near[0])[0]]


@st.composite
def situations(draw: st.DrawFn) -> tuple[GroupLoads, RouteHint]:
    """Any loads, overlaps, adapters, homes, tenants and groups to choose last."""
    count = draw(st.integers(1, 8))
    columns = st.lists(TOKENS, min_size=count, max_size=count)
    places = st.sets(st.integers(0, count - 1), max_size=count)
    outstanding = draw(columns)
    own = [min(a, b) for a, b in zip(outstanding, draw(columns), strict=True)]
    overlaps = {f"g{i}": (draw(st.integers(0, 4000)), draw(st.integers(0, 4000))) for i in draw(places)}
    groups = loads(
        outstanding,
        own=own,
        last=draw(places),
        tiers={tier: draw(places) for tier in Tier},
        copy_share=draw(st.just([]) | st.lists(st.floats(0, 2), min_size=count, max_size=count)),
        late_share=draw(st.floats(0, 1)),
        tenants=draw(st.integers(1, 5)),
        home=draw(st.none() | st.integers(0, count - 1)),
    )
    return groups, hint(draw(st.integers(1, 50_000)), adapter=draw(st.none() | st.just("k")), overlaps=overlaps)


def test_the_names_are_those_of_the_flag() -> None:
    assert set(NAMES) == set(get_args(RoutingPolicyName)) and DEFAULT_POLICY == "joint"
    with pytest.raises(ValueError, match=r"'fastest' is not a routing policy; there are joint, least-tokens, "):
        policy_by_name("fastest")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(situation=situations())
def test_every_policy_offers_few_groups_and_those_to_choose_last_come_last(
    name: str, situation: tuple[GroupLoads, RouteHint]
) -> None:
    groups, request = situation
    policy = policy_by_name(name, random.Random(1))
    few = choose(policy, groups, request, lambda near: near[-1])
    assert len(few) == len(set(few)) == min(FEW, len(groups.groups))
    is_last = [index in groups.last for index in few]
    assert is_last == sorted(is_last), "whatever their overlap"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "p2c"])
@settings(max_examples=40)
@given(situation=situations())
def test_costs_are_only_looked_at(name: str, situation: tuple[GroupLoads, RouteHint]) -> None:
    groups, request = situation
    policy = policy_by_name(name)
    assert np.array_equal(policy.costs(groups, request), policy.costs(groups, request))


@pytest.mark.parametrize("name", ["joint", "prefix"])
@settings(max_examples=40)
@given(situation=situations(), more=st.tuples(st.integers(0, 500), st.integers(0, 500)))
def test_more_overlap_never_costs_more(
    name: str, situation: tuple[GroupLoads, RouteHint], more: tuple[int, int]
) -> None:
    groups, request = situation
    assume(request.overlaps)
    policy = policy_by_name(name)
    group = next(iter(request.overlaps))
    place, has = groups.places[group], request.overlaps[group]
    richer = msgspec.structs.replace(
        request, overlaps={**request.overlaps, group: (has[0] + more[0], has[1] + more[1])}
    )
    before, after = policy.costs(groups, request), policy.costs(groups, richer)
    assert after[place] <= before[place]
    assert [c for i, c in enumerate(after) if i != place] == [c for i, c in enumerate(before) if i != place]


@pytest.mark.parametrize("name", ["joint", "least-tokens", "adapter", "prefix", "session"])
@settings(max_examples=40)
@given(situation=situations(), more=st.integers(0, 5000))
def test_more_to_do_never_makes_a_group_cheaper_than_it_was_beside_the_others(
    name: str, situation: tuple[GroupLoads, RouteHint], more: int
) -> None:
    groups, request = situation
    groups = msgspec.structs.replace(groups, tenants=1)  # with several, shares of the fleet change too
    policy = policy_by_name(name)
    busier = np.array([groups.outstanding[0] + more, *groups.outstanding[1:]])
    before = policy.costs(groups, request)
    after = policy.costs(msgspec.structs.replace(groups, outstanding=busier), request)
    others = [(b, a) for b, a in zip(before[1:], after[1:], strict=True)]
    assert all(after[0] - a >= before[0] - b - 1e-6 for b, a in others) or name in ("prefix", "session")
    assert after[0] >= before[0] or name in ("prefix", "session")  # they leave crowds, and what is one is a mean's


@pytest.mark.parametrize("name", NAMES)
def test_equal_groups_share_requests(name: str) -> None:
    rng = random.Random(4)
    policy = policy_by_name(name, rng)
    tokens, taken = [0] * 8, Counter[int]()
    for _ in range(800):
        groups = loads(list(tokens))
        place = choose(policy, groups, hint(100), rng.choice)[0]
        policy.sent(groups.groups[place])
        tokens[place] += 100
        taken[place] += 1
    assert max(taken.values()) <= 1.12 * min(taken.values()), taken


def test_joint_weighs_the_cached_prompt_against_load() -> None:
    request = hint(5000, overlaps={"g1": (3000, 0)})
    assert first(Joint(), loads([0, 2900]), request) == "g1"
    assert first(Joint(), loads([0, 3100]), request) == "g0"


def test_kv_below_the_device_is_worth_what_its_copy_saves() -> None:
    def worth(copy_share: float | None) -> float:
        groups = loads([0, 0], copy_share=[] if copy_share is None else [0.0, copy_share])
        costs = Joint().costs(groups, hint(5000, overlaps={"g1": (1000, 2000)}))
        return costs[0] - costs[1]

    assert [worth(share) for share in (0.0, 0.25, 1.0, 3.0)] == [3000, 2500, 1000, 1000], "never less than the device's"
    assert worth(None) == worth(UNMEASURED_COPY_SHARE)


def test_joint_adds_what_an_adapter_misses() -> None:
    costs = Joint().costs(loads([0, 0], tiers={Tier.DEVICE: [1]}), hint(1000, adapter="k"))
    assert costs[0] - costs[1] == MISS_TOKENS + MISS_REQUESTS * 1000


def test_a_home_is_worth_a_quarter_request_until_some_group_has_kv() -> None:
    request = hint(1000, session="s")
    quarter = HOME_REQUESTS * 1000
    assert quarter == 250
    assert first(Joint(), loads([0, 249], home=1), request) == "g1"
    assert first(Joint(), loads([0, 251], home=1), request) == "g0"
    known = msgspec.structs.replace(request, overlaps={"g0": (300, 0)})
    assert first(Joint(), loads([0, 0], home=1), known) == "g0"


def test_chance_decides_between_loads_and_not_between_overlaps() -> None:
    near: list[int] = []

    def pick(among: Any) -> int:
        near[:] = among
        return int(among[0])

    choose(Joint(), loads([0, 0, 100, 0]), hint(4000, overlaps={"g1": (500, 0), "g2": (500, 0)}), pick)
    assert near == [1, 2], "g0 and g3 are as cheap within a quarter, but would compute 500 tokens more"


def test_a_tenants_requests_spread_while_others_use_the_fleet() -> None:
    groups = loads([500, 520], own=[50, 10], tenants=4)
    assert first(Joint(), groups, hint(10)) == "g1"
    assert first(Joint(), msgspec.structs.replace(groups, tenants=1), hint(10)) == "g0", "alone, load is load"


def test_a_flood_is_not_drawn_to_the_groups_of_others() -> None:
    """What g0 has to do is all of another tenant."""
    flood = loads([1000, 900, 3000], own=[0, 900, 3000], tenants=2)
    assert first(Joint(), flood, hint(10)) == "g1"
    within_its_share = loads([1000, 900, 3000], own=[0, 900, 0], tenants=2)
    assert first(Joint(), within_its_share, hint(10)) == "g0"


@settings(max_examples=40)
@given(own=st.lists(st.integers(0, 1000), min_size=2, max_size=6), tenants=st.integers(1, 5), late=st.floats(0, 1))
def test_own_tokens_never_count_less_than_others(own: list[int], tenants: int, late: float) -> None:
    """Others' may be the same flood's by another gateway: each would drive the other's from group to group."""
    groups = loads([1000] * len(own), own=own, tenants=tenants, late_share=late)
    costs = Joint().costs(groups, hint(10))
    by_own = [cost for _, cost in sorted(zip(own, costs, strict=True))]
    assert all(a <= b + 1e-6 for a, b in pairwise(by_own))


def test_what_is_known_exactly_weighs_more_where_much_is_known_late() -> None:
    groups = loads([100, 120], own=[100, 0])
    assert first(Joint(), groups, hint(10)) == "g0", "one gateway: all is exact"
    assert first(Joint(), msgspec.structs.replace(groups, late_share=0.5), hint(10)) == "g1"


def test_prefix_and_session_leave_a_crowd() -> None:
    wanted = hint(100, overlaps={"g1": (90, 0)}, session="s")
    for name in ("prefix", "session"):
        policy = policy_by_name(name)
        assert first(policy, loads([0, 300], home=1), wanted) == "g1", name
        assert first(policy, loads([0, 3000], home=1), wanted) == "g0", name
    assert first(policy_by_name("session"), loads([50, 30]), hint(10)) == "g1", "without a session by tokens"


def test_two_choices_never_takes_the_worst_and_round_robin_takes_turns() -> None:
    groups = loads([10, 20, 30, 40])
    p2c = policy_by_name("p2c", random.Random(2))
    taken = Counter(first(p2c, groups, hint()) for _ in range(300))
    assert set(taken) == {"g0", "g1", "g2"} and taken["g0"] > taken["g1"] > taken["g2"]
    turns = policy_by_name("round-robin")
    order = []
    for names in (["a", "b", "c"], ["a", "b", "c"], ["a", "b", "c"], ["a", "c", "d"], ["a", "c", "d"]):
        given_to = first(turns, msgspec.structs.replace(loads([0] * 3), groups=names), hint())
        turns.sent(given_to)
        order.append(given_to)
    assert order == ["a", "b", "c", "d", "a"], "a new group is next, one that left is not missed"
