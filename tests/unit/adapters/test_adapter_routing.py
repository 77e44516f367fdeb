"""Where a request with an adapter goes: where it lies, as long as that costs no more than loading it elsewhere."""

import random
from collections import Counter, OrderedDict

import pytest

from tandem.cluster.routing.group_view import GroupView
from tandem.cluster.routing.policy import (
    MISS_REQUESTS,
    MISS_TOKENS,
    AdapterAffinity,
    LeastOutstandingTokens,
    RoutingPolicy,
    best_first,
)
from tandem.cluster.routing.residency import EXPECTED_S, Residency, Tier, adapter_key, home_of
from tandem.cluster.routing.route_hint import RouteHint

REQUEST = RouteHint(request_id="r", cost_tokens=100, adapter="k")
MISS = MISS_TOKENS + MISS_REQUESTS * REQUEST.cost_tokens


def order(views: list[GroupView], request: RouteHint = REQUEST) -> str:
    return "".join(views[i].group for i in best_first(AdapterAffinity(), views, request))


def view(group: str, tier: Tier, tokens: int = 0) -> GroupView:
    return GroupView(group=group, adapter=tier, outstanding_here=tokens)


def test_among_groups_of_similar_load_device_is_before_host_before_none() -> None:
    views = [view("a", Tier.NONE), view("b", Tier.HOST, 30), view("c", Tier.DEVICE, 90), view("d", Tier.HOME)]
    assert order(views) == "cbda"


def test_load_beats_residency_beyond_the_worth_of_a_load() -> None:
    views = [view("a", Tier.NONE), view("b", Tier.DEVICE, MISS - 1)]
    assert order(views) == "ba"
    assert order([view("a", Tier.NONE), view("b", Tier.DEVICE, MISS + 1)]) == "ab"


def test_long_answers_alone_are_no_reason_to_load_it_elsewhere() -> None:
    big = RouteHint(request_id="r", cost_tokens=50_000, adapter="k")
    assert order([view("a", Tier.NONE), view("b", Tier.DEVICE, 50_000)], big) == "ba"
    assert order([view("a", Tier.NONE), view("b", Tier.DEVICE, 150_000)], big) == "ab"


def test_without_an_adapter_tokens_decide_alone() -> None:
    base = RouteHint(request_id="r", cost_tokens=100)
    views = [view("a", Tier.NONE, 11), view("b", Tier.DEVICE, 12), view("c", Tier.HOST, 10)]
    assert order(views, base) == "cab"


def test_a_group_that_stalls_is_last_although_it_has_the_adapter() -> None:
    views = [view("a", Tier.NONE, 5000), GroupView(group="b", adapter=Tier.DEVICE, stalled_s=9.0)]
    assert order(views) == "ab"


def test_homes_spread_evenly_and_stay_when_a_group_goes() -> None:
    groups = ["g1", "g2", "g3", "g4"]
    homes = {f"k{i}": home_of(f"k{i}", groups) for i in range(400)}
    assert all(70 <= count <= 130 for count in Counter(homes.values()).values())
    left = {key: home_of(key, [g for g in groups if g != "g2"]) for key in homes}
    assert all(left[key] == home for key, home in homes.items() if home != "g2")


def test_a_report_says_where_an_adapter_is() -> None:
    residency = Residency()
    residency.sent("a", "z", -100.0)
    tiers = [residency.tier("a", key, 0.0, on_device=["x"], on_host=["y", "x"]) for key in "xyz"]
    assert tiers == [Tier.DEVICE, Tier.HOST, Tier.NONE]


def test_what_was_sent_to_a_group_that_is_gone_is_forgotten() -> None:
    residency = Residency()
    for group in "ab":
        residency.sent(group, "x", 0.0)
    residency.keep_only(["b"])
    assert [residency.tier(group, "x", 0.0) for group in "ab"] == [Tier.NONE, Tier.DEVICE]


def test_what_was_sent_counts_until_a_report_could_say_so() -> None:
    residency = Residency()
    residency.sent("a", "x", 10.0)
    assert residency.tier("a", "x", 10.0 + EXPECTED_S) is Tier.DEVICE
    assert residency.tier("a", "x", 10.1 + EXPECTED_S) is Tier.NONE
    for i in range(1000):
        residency.sent("a", f"k{i}", 100.0 + i)
    assert len(residency._sent) <= EXPECTED_S + 1, "what is over is forgotten"


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
        rng = random.Random(7)
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
        home = home_of(key, (group.name for group in self.groups))
        views = []
        for group in self.groups:
            tier = residency.tier(group.name, key, now_s, group.reported)
            tier = Tier.HOME if tier is Tier.NONE and group.name == home else tier
            views.append(GroupView(group=group.name, outstanding_here=int(group.work), adapter=tier))
        request = RouteHint(request_id="r", cost_tokens=200, adapter=key)
        return self.groups[best_first(policy, views, request)[0]]


@pytest.fixture(scope="module")
def affine() -> Outcome:
    return Outcome(AdapterAffinity())


def test_most_requests_find_their_adapter_and_no_group_is_left_behind(affine: Outcome) -> None:
    blind = Outcome(LeastOutstandingTokens())
    print(f"loads {blind.loads} -> {affine.loads}, most work {blind.most_work:.0f} -> {affine.most_work:.0f}")
    assert affine.loads < blind.loads / 2
    assert affine.most_work < blind.most_work + MISS_TOKENS + MISS_REQUESTS * 200


def test_popular_adapters_spread_and_rare_ones_do_not(affine: Outcome) -> None:
    hot = Outcome(AdapterAffinity(), adapters=1, requests=2000)
    assert hot.mean_holders(0, 1) > 3.5, "one adapter for all: every group serves it"
    popular, rare = affine.mean_holders(0, 4), affine.mean_holders(32, 64)
    print(f"groups that hold one of the 4 most popular {popular:.2f}, one of the rarer half {rare:.2f}")
    assert popular > 1.2
    assert popular > 4 * rare


def test_short_digests_name_adapters() -> None:
    assert adapter_key("0123456789abcdef" * 4) == "0123456789abcdef"
