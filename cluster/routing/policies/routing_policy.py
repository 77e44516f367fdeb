"""RoutingPolicy: every group has a cost for a request, which goes to one of the cheapest.

A new policy is a class with these three members in a new file of this folder, and a name in policy_names.py. None of
them imports Ray: the Serve router (router/serve_router.py), tests and simulations call them alike.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.route_hint import RouteHint

FEW: Final = 4
"""Groups that are tried in order; the others only when none of these takes the request."""
NEAR_REQUESTS: Final = 0.25
"""Groups whose cost is above the least by at most this share of the request are as good as the cheapest."""
LAST_COST: Final = 2.0**48
"""Above every cost of a policy, and small enough to keep the order of what it is added to."""
FAR_COST: Final = 2.0**46
"""Addition of a policy to the cost of groups that it wants only when no other is left: above every sum of tokens."""

Pick = Callable[[Sequence[int]], int]
"""Chooses one of several groups that are as good as each other."""


class RoutingPolicy(Protocol):
    """One way to choose a group. Groups are their indices in the columns of GroupLoads."""

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        """Returns a new array with one cost per group; lower is better. `groups.last` is not its concern. It changes
        nothing: who only explains a choice calls it too."""
        ...

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        """Returns the groups that are as good as the cheapest, which is one of them, in their order. costs: of this
        policy, with LAST_COST added to those of `groups.last`."""
        ...

    def sent(self, group: str) -> None:
        """Notes that a request goes to the group."""
        ...


def choose(
    policy: RoutingPolicy, groups: GroupLoads, request: RouteHint, pick: Pick, costs: CostsG | None = None
) -> list[int]:
    """Returns up to FEW groups, best first; tells the policy nothing. The first is one that `pick` chooses among the
    groups that are as good as the cheapest: gateways see each other's requests seconds late, and without chance all
    would send theirs to the same group. Those of `last` come last whatever their cost. costs: what the policy has just
    said, and is changed here; None: it is asked. O(groups)."""
    costs = policy.costs(groups, request) if costs is None else costs
    assert len(costs) == len(groups.groups), "every group has a cost"
    if groups.last:
        costs[list(groups.last)] += LAST_COST
    near = policy.near(costs, groups, request)
    first = near[0] if len(near) == 1 else pick(near)
    few = range(len(costs)) if len(costs) <= FEW else costs.argpartition(FEW)[:FEW].tolist()
    return [first, *(index for index in sorted(few, key=costs.__getitem__) if index != first)][:FEW]


def within(costs: CostsG, margin: float) -> list[int]:
    """Returns the groups whose cost is above the least by at most `margin`, in their order."""
    near: list[int] = (costs <= costs[costs.argmin()] + margin).nonzero()[0].tolist()
    return near


def near_request(costs: CostsG, request: RouteHint) -> list[int]:
    """Returns the groups whose cost is above the least by at most a quarter of the request."""
    return within(costs, NEAR_REQUESTS * request.cost_tokens)


def crowded(groups: GroupLoads, request: RouteHint) -> list[int]:
    """Returns the groups with more tokens to come than CROWDED_TIMES the mean of all and CROWDED_REQUESTS of this size.
    A policy that looks for something other than load does without it there: else one popular prompt or session has
    everybody wait for one group."""
    most = CROWDED_TIMES * groups.outstanding.mean() + CROWDED_REQUESTS * request.cost_tokens
    above: list[int] = (groups.outstanding > most).nonzero()[0].tolist()
    return above


CROWDED_TIMES: Final = 1.5
CROWDED_REQUESTS: Final = 4
