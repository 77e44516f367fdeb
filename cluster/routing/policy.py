"""Routing policy: every group has a cost for a request, which goes to one of the cheapest.

Pure functions of the loads; the Serve router calls them and falls back to no preference when one raises.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from types import MappingProxyType
from typing import Final

from tandem.cluster.routing.group_loads import GroupLoads
from tandem.cluster.routing.residency import Tier
from tandem.cluster.routing.route_hint import RouteHint

MISS_TOKENS: Final = 512
"""Tokens to come that loading an adapter from its source is worth, besides MISS_REQUESTS of the request's own size:
with long answers allowed, one request more is no reason to load it elsewhere."""
MISS_REQUESTS: Final = 2
TIER_SHARES: Final[Mapping[Tier, float]] = MappingProxyType({Tier.DEVICE: 0.0, Tier.HOST: 0.25, Tier.HOME: 0.75})
"""Shares of a miss; all of it where a group has nothing of the adapter."""
FEW: Final = 4
"""Groups that are tried in order; the others only when none of these takes the request."""
NEAR_REQUESTS: Final = 0.25
"""Groups whose cost is above the least by at most this share of the request are as good as the cheapest."""
LAST_COST: Final = 2.0**48
"""Above every sum of tokens, and small enough to keep the order of what it is added to."""

Pick = Callable[[Sequence[int]], int]
"""Chooses one of several groups that are as good as each other."""


def adapter_affinity(groups: GroupLoads, request: RouteHint) -> list[float]:
    """A new list with one cost per group, in tokens; lower is better. `last` is not its concern.

    The cost is the outstanding tokens, and more where a group would have to load the request's adapter. So among groups
    of similar load the request goes where its adapter lies, device before host before none; when those have more to do
    than the others by what a load is worth, one more group gets it: the more popular an adapter, the more groups hold
    it. Requests without an adapter are routed by tokens alone: a long answer weighs more than many short ones. Tokens
    of the request's own tenant count twice: where tenants share rows, a request waits for its own tenant's first, and a
    tenant whose requests meet in one group has less than its share of all.
    """
    if request.adapter is None:
        return [tokens + own for tokens, own in zip(groups.outstanding, groups.own, strict=True)]
    miss = MISS_TOKENS + MISS_REQUESTS * request.cost_tokens
    costs: list[float] = [tokens + miss for tokens in groups.outstanding]
    for tier, indices in groups.tiers.items():
        cheaper = miss - TIER_SHARES[tier] * miss
        for index in indices:
            costs[index] -= cheaper
    return costs


def best_few(costs: list[float], groups: GroupLoads, request: RouteHint, pick: Pick) -> list[int]:
    """Returns up to FEW groups, best first; `costs` are changed. The first is one that `pick` chooses among the groups
    that are as good as the cheapest: gateways see each other's requests seconds late, and without chance all would send
    theirs to the same group. Those of `last` come last whatever their cost. O(groups)."""
    assert len(costs) == len(groups.groups), "every group has a cost"
    for index in groups.last:
        costs[index] += LAST_COST
    limit = min(costs) + NEAR_REQUESTS * request.cost_tokens
    near = [index for index, cost in enumerate(costs) if cost <= limit]
    first = near[0] if len(near) == 1 else pick(near)
    few = nsmallest(FEW, range(len(costs)), key=costs.__getitem__)
    return [first, *(index for index in few if index != first)][:FEW]
