"""LeastTokens: the group with the fewest tokens to come."""

import numpy as np

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.policies.routing_policy import near_request
from tandem.cluster.routing.route_hint import RouteHint


class LeastTokens:
    """Implements RoutingPolicy by load alone: a long answer weighs more than many short ones."""

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        return groups.outstanding.astype(np.float64)

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        return near_request(costs, request)

    def sent(self, group: str) -> None:
        """Implements RoutingPolicy."""
