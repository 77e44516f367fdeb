"""AdapterAffinity: load, and where the request's adapter lies."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.policies.routing_policy import near_request
from tandem.cluster.routing.residency import Tier
from tandem.cluster.routing.route_hint import RouteHint

MISS_TOKENS: Final = 512
"""Tokens to come that loading an adapter from its source is worth, besides MISS_REQUESTS of the request's own size:
with long answers allowed, one request more is no reason to load it elsewhere."""
MISS_REQUESTS: Final = 2
TIER_SHARES: Final[Mapping[Tier, float]] = MappingProxyType({Tier.DEVICE: 0.0, Tier.HOST: 0.25, Tier.HOME: 0.75})
"""Shares of a miss; all of it where a group has nothing of the adapter."""


class AdapterAffinity:
    """Implements RoutingPolicy. The cost is the outstanding tokens, and more where a group would have to load the
    request's adapter. So among groups of similar load the request goes where its adapter lies, device before host
    before none; when those have more to do than the others by what a load is worth, one more group gets it: the more
    popular an adapter, the more groups hold it.

    Requests without an adapter are routed by tokens, and those of their own tenant count twice: where tenants share
    rows, a request waits for its own tenant's first, and a tenant whose requests meet in one group has less than its
    share of all.
    """

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        if request.adapter is None:
            return (groups.outstanding + groups.own).astype(np.float64)
        miss = miss_tokens(request)
        costs: CostsG = miss + groups.outstanding
        take_off_found(costs, groups, miss)
        return costs

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        return near_request(costs, request)

    def sent(self, group: str) -> None:
        """Implements RoutingPolicy."""


def miss_tokens(request: RouteHint) -> float:
    """Returns what a group costs more that has nothing of the request's adapter; 0 without one."""
    return 0.0 if request.adapter is None else float(MISS_TOKENS + MISS_REQUESTS * request.cost_tokens)


def take_off_found(costs: CostsG, groups: GroupLoads, miss: float) -> None:
    """Takes off costs that have the miss what each group need not load of it."""
    for tier, indices in groups.tiers.items():
        if indices:
            costs[list(indices)] -= miss - TIER_SHARES[tier] * miss
