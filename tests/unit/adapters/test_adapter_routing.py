"""Where a request with an adapter goes: where it lies, as long as that costs no more than loading it elsewhere."""

import random
from collections import Counter, OrderedDict

import numpy as np
import pytest

from tandem.cluster.routing.group_loads import GroupLoads
from tandem.cluster.routing.policies.adapter_affinity import MISS_REQUESTS, MISS_TOKENS, AdapterAffinity
from tandem.cluster.routing.policies.joint import Joint
from tandem.cluster.routing.policies.least_tokens import LeastTokens
from tandem.cluster.routing.policies.routing_policy import NEAR_REQUESTS, RoutingPolicy, choose
from tandem.cluster.routing.residency import EXPECTED_S, MOST_HOMES, Homes, Residency, Tier, adapter_key, home_of
from tandem.cluster.routing.route_hint import RouteHint

REQUEST = RouteHint(request_id="r", cost_tokens=100, adapter="k")
MISS = MISS_TOKENS + MISS_REQUESTS * REQUEST.cost_tokens


def order(groups: dict[str, tuple[int, Tier | None]], request: RouteHint = REQUEST, last: str = "") -> str:
    """The groups to try, by their tokens to come and where they have the adapter; of equals the first."""
    names = list(groups)
    loads = GroupLoads(
        groups=names,
        outstanding=np.array([tokens for tokens, _ in groups.values()]),
        own=np.zeros(len(names), np.int64),
        last=[names.index(name) for name in last],
        tiers={tier: [names.index(n) for n, (_, has) in groups.items() if has is tier] for tier in Tier},
    )
    return "".join(names[i] for i in choose(AdapterAffinity(), loads, request, lambda near: near[0]))


def test_among_groups_of_similar_load_device_is_before_host_before_none() -> None:
    groups = {"a": (0, None), "b": (30, Tier.HOST), "c": (90, Tier.DEVICE), "d": (0, Tier.HOME)}
    assert order(groups) == "cbda"


def test_load_beats_residency_beyond_the_worth_of_a_load() -> None:
    near = NEAR_REQUESTS * REQUEST.cost_tokens
    assert order({"a": (0, None), "b": (int(MISS - near) - 1, Tier.DEVICE)}) == "ba"
    assert order({"a": (0, None), "b": (int(MISS + near) + 1, Tier.DEVICE)}) == "ab"


def test_long_answers_alone_are_no_reason_to_load_it_elsewhere() -> None:
    big = RouteHint(request_id="r", cost_tokens=50_000, adapter="k")
    assert order({"a": (0, None), "b": (50_000, Tier.DEVICE)}, big) == "ba"
    assert order({"a": (0, None), "b": (150_000, Tier.DEVICE)}, big) == "ab"


def test_without_an_adapter_tokens_decide_alone() -> None:
    base = RouteHint(request_id="r", cost_tokens=1)
    assert order({"a": (11, None), "b": (12, Tier.DEVICE), "c": (10, Tier.HOST)}, base) == "cab"


def test_a_group_that_stalls_is_last_although_it_has_the_adapter() -> None:
    assert order({"a": (5000, None), "b": (0, Tier.DEVICE)}, last="b") == "ab"


def test_homes_spread_evenly_and_stay_when_a_group_goes() -> None:
    groups = ["g1", "g2", "g3", "g4"]
    homes = {f"k{i}": home_of(f"k{i}", groups) for i in range(400)}
    assert all(70 <= count <= 130 for count in Counter(homes.values()).values())
    left = {key: home_of(key, [g for g in groups if g != "g2"]) for key in homes}
    assert all(left[key] == home for key, home in homes.items() if home != "g2")


def test_a_home_is_remembered_until_the_groups_change() -> None:
    homes = Homes()
    homes.set_groups(["g2", "g1", "g3"])
    first = {f"k{i}": homes.home(f"k{i}") for i in range(50)}
    assert first == {key: home_of(key, ["g1", "g2", "g3"]) for key in first}
    homes.set_groups(["g1", "g3", "g2"])
    assert {key: homes.home(key) for key in first} == first
    homes.set_groups(["g1", "g3"])
    assert {key: homes.home(key) for key in first} == {key: home_of(key, ["g1", "g3"]) for key in first}
    for i in range(10_000):
        homes.home(f"x{i}")
    assert len(homes._homes) <= MOST_HOMES


def test_a_report_says_where_an_adapter_is() -> None:
    residency = Residency()
    residency.sent("a", "z", -100.0)
    residency.report("a", ["x"], ["y", "x"])
    assert [residency.holders(key, 0.0) for key in "xyz"] == [{"a": Tier.DEVICE}, {"a": Tier.HOST}, {}]
    residency.report("a", ["y"], [])
    assert [residency.holders(key, 0.0) for key in "xyz"] == [{}, {"a": Tier.DEVICE}, {}]


def test_what_was_said_of_or_sent_to_a_group_that_is_gone_is_forgotten() -> None:
    residency = Residency()
    for group in "ab":
        residency.sent(group, "x", 0.0)
        residency.report(group, ["y"])
    residency.keep_only(["b"])
    assert [residency.holders(key, 0.0) for key in "xy"] == [{"b": Tier.DEVICE}] * 2
    residency.keep_only([])
    assert not (residency._holders or residency._reports or residency._sent or residency._expected)


def test_what_was_sent_counts_until_a_report_could_say_so() -> None:
    residency = Residency()
    residency.sent("a", "x", 10.0)
    residency.report("a", [], ["x"])
    assert residency.holders("x", 10.0 + EXPECTED_S) == {"a": Tier.DEVICE}
    assert residency.holders("x", 10.1 + EXPECTED_S) == {"a": Tier.HOST}
    for i in range(1000):
        residency.sent("a", f"k{i}", 100.0 + i)
    assert len(residency._sent) <= EXPECTED_S + 1 and len(residency._expected) <= EXPECTED_S + 1, (
        "the rest is forgotten"
    )


class _Group:
    """Serves RATE tokens a second, first come first served; a least recently used cache of ROOM adapters."""

    ROOM = 8
    RATE = 1000.0
    LOAD_TOKENS = 300
    """What a load keeps the group from, in tokens."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: OrderedDict[str, None] = OrderedDict()
        self.reported: list[str] = []
        self.work = 0.0
        self.most_work = 0.0
        self.loads = 0

    def take(self, key: str, tokens: int) -> None:
        if key not in self.held:
            self.loads += 1
            self.work += self.LOAD_TOKENS
        self.held[key] = None
        self.held.move_to_end(key)
        while len(self.held) > self.ROOM:
            self.held.popitem(last=False)
        self.work += tokens
        self.most_work = max(self.most_work, self.work)

    def pass_time(self, seconds: float) -> None:
        self.work = max(0.0, self.work - seconds * self.RATE)


class Outcome:
    """A simulation: 4 groups with room for 8 adapters each, 64 adapters asked for by Zipf's law, Poisson arrivals at
    60 % of what the groups serve, 200 tokens each, reports every 2 s."""

    def __init__(self, policy: RoutingPolicy, adapters: int = 64, requests: int = 4000, skew: float = 1.0) -> None:
        rng, self.rng = random.Random(7), random.Random(8)
        self.groups = [_Group(f"g{i}") for i in range(4)]
        self.holders: Counter[str] = Counter()
        keys = [f"k{i:03}" for i in range(adapters)]
        weights = [1 / (rank + 1) ** skew for rank in range(adapters)]
        residency, now_s, reported_s = Residency(), 0.0, -9.0
        self.reports = 0
        for _ in range(requests):
            passed_s = rng.expovariate(0.6 * 4 * _Group.RATE / 200)
            now_s += passed_s
            for group in self.groups:
                group.pass_time(passed_s)
            if now_s - reported_s >= 2.0:
                reported_s = now_s
                self.reports += 1
                for group in self.groups:
                    group.reported = list(group.held)
                    self.holders.update(group.held.keys())
            (key,) = rng.choices(keys, weights)
            chosen = self._route(policy, residency, key, now_s)
            residency.sent(chosen.name, key, now_s)
            chosen.take(key, 200)
        self.loads = sum(group.loads for group in self.groups)
        self.most_work = max(group.most_work for group in self.groups)

    def mean_holders(self, first: int, last: int) -> float:
        """How many groups held each of these adapters, over all reports."""
        return sum(self.holders[f"k{i:03}"] for i in range(first, last)) / self.reports / (last - first)

    def _route(self, policy: RoutingPolicy, residency: Residency, key: str, now_s: float) -> _Group:
        names = [group.name for group in self.groups]
        for group in self.groups:
            residency.report(group.name, group.reported)
        tiers: dict[Tier, list[int]] = {tier: [] for tier in Tier}
        holders = residency.holders(key, now_s)
        for name in names:
            if name in holders:
                tiers[holders[name]].append(names.index(name))
        if (home := home_of(key, names)) not in holders:
            tiers[Tier.HOME].append(names.index(home))
        loads = GroupLoads(
            groups=names,
            outstanding=np.array([int(group.work) for group in self.groups]),
            own=np.zeros(len(names), np.int64),
            tiers=tiers,
        )
        request = RouteHint(request_id="r", cost_tokens=200, adapter=key)
        return self.groups[choose(policy, loads, request, self.rng.choice)[0]]


@pytest.fixture(scope="module", params=[AdapterAffinity, Joint])
def affine(request: pytest.FixtureRequest) -> Outcome:
    return Outcome(request.param())


def test_most_requests_find_their_adapter_and_no_group_is_left_behind(affine: Outcome) -> None:
    blind = Outcome(LeastTokens())
    print(f"loads {blind.loads} -> {affine.loads}, most work {blind.most_work:.0f} -> {affine.most_work:.0f}")
    assert affine.loads < blind.loads / 2
    assert affine.most_work < blind.most_work + MISS_TOKENS + MISS_REQUESTS * 200


def test_popular_adapters_spread_and_rare_ones_do_not(affine: Outcome) -> None:
    hot = Outcome(Joint(), adapters=1, requests=2000)
    assert hot.mean_holders(0, 1) > 3.5, "one adapter for all: every group serves it"
    popular, rare = affine.mean_holders(0, 4), affine.mean_holders(32, 64)
    print(f"groups that hold one of the 4 most popular {popular:.2f}, one of the rarer half {rare:.2f}")
    assert popular > 1.2
    assert popular > 4 * rare


def test_short_digests_name_adapters() -> None:
    assert adapter_key("0123456789abcdef" * 4) == "0123456789abcdef"
