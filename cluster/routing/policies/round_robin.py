"""RoundRobin: each group in turn, whatever it has to do."""

import numpy as np

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.policies.routing_policy import within
from tandem.cluster.routing.route_hint import RouteHint


class RoundRobin:
    """Implements RoutingPolicy. The cost is the number of the request that the group got last, so that groups may come
    and go in between; those that have had none are first."""

    def __init__(self) -> None:
        self._turn = 0
        self._turns: dict[str, int] = {}

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        return np.array([self._turns.get(group, 0) for group in groups.groups], np.float64)

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        return within(costs, 0.0)

    def sent(self, group: str) -> None:
        """Gives the group the last place in the turn. Groups that have left are forgotten in time."""
        self._turn += 1
        self._turns.pop(group, None)
        self._turns[group] = self._turn
        while len(self._turns) > MOST_GROUPS:
            del self._turns[next(iter(self._turns))]


MOST_GROUPS = 4096
