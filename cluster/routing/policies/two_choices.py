"""TwoChoices: of two groups drawn by chance, the one with fewer tokens to come ("power of two choices", Mitzenmacher
1996; Ray Serve's own default counts requests)."""

import random

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.policies.routing_policy import FAR_COST, within
from tandem.cluster.routing.route_hint import RouteHint


class TwoChoices:
    """Implements RoutingPolicy. Each call of costs() draws anew; groups that are not drawn come after the two."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        last = set(groups.last)
        able = [index for index in range(len(groups.groups)) if index not in last] or list(range(len(groups.groups)))
        costs: CostsG = FAR_COST + groups.outstanding
        costs[self._rng.sample(able, min(2, len(able)))] -= FAR_COST
        return costs

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        return within(costs, 0.0)

    def sent(self, group: str) -> None:
        """Implements RoutingPolicy."""
