"""PrefixAffinity: the group with the most KV of the prompt; load decides only between equals, or when it is crowded."""

import numpy as np

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.policies.routing_policy import FAR_COST, crowded, near_request
from tandem.cluster.routing.route_hint import RouteHint

TOKEN_COST = 2.0**23
"""The worth of one more token of overlap: more than any load, and a million of them less than FAR_COST."""


class PrefixAffinity:
    """Implements RoutingPolicy. KV on the device and below it count alike."""

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        costs = groups.outstanding.astype(np.float64)
        places = groups.places if request.overlaps else {}
        for group, (device, below) in request.overlaps.items():
            if group in places:
                costs[places[group]] -= TOKEN_COST * (device + below)
        costs[crowded(groups, request)] += FAR_COST
        return costs

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        return near_request(costs, request)

    def sent(self, group: str) -> None:
        """Implements RoutingPolicy."""
