"""SessionAffinity: all requests of a session go to one group, its home, unless that is crowded."""

import numpy as np

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.policies.routing_policy import FAR_COST, crowded, near_request
from tandem.cluster.routing.route_hint import RouteHint


class SessionAffinity:
    """Implements RoutingPolicy. Homes need no report of the groups, and move only when groups come or go (rendezvous
    hashing, residency.py). Requests without a session are routed by tokens to come."""

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        costs = groups.outstanding.astype(np.float64)
        if groups.home is not None and groups.home not in crowded(groups, request):
            costs[groups.home] -= FAR_COST
        return costs

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        return near_request(costs, request)

    def sent(self, group: str) -> None:
        """Implements RoutingPolicy."""
