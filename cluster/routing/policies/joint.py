"""Joint: load, KV, adapter, the tenant's share and the session's home in one cost. The default.

The unit is a token of prefill: what a group has to do before the request, and what the request adds to it there.
"""

from typing import Final

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.policies.adapter_affinity import miss_tokens, take_off_found
from tandem.cluster.routing.policies.routing_policy import NEAR_REQUESTS, within
from tandem.cluster.routing.route_hint import RouteHint

LATE_WEIGHT: Final = 4.0
"""Tokens of others count wholly half from a quarter of late news on."""
HOME_REQUESTS: Final = 0.25
"""Share of the request that its session's home is worth, where no group is known to have its KV."""


class Joint:
    """Implements RoutingPolicy. The cost of a group, in tokens:

    tokens to come there (those of others may count half, see _load), and this request's prompt and expected output
    - KV of its prompt on the device, and below it (host memory, disk) as far as loading is cheaper than computing
    + the worth of loading its adapter, if the group has it not
    - a quarter of the request at its session's home, when no group is known to have its KV
    """

    def costs(self, groups: GroupLoads, request: RouteHint) -> CostsG:
        whole = request.cost_tokens
        miss = miss_tokens(request)
        costs = _load(groups, whole + miss)
        if miss:
            take_off_found(costs, groups, miss)
        if request.overlaps:
            costs -= _all_saved(groups, request)
        if groups.home is not None and not request.overlaps:
            costs[groups.home] -= HOME_REQUESTS * whole
        return costs

    def near(self, costs: CostsG, groups: GroupLoads, request: RouteHint) -> list[int]:
        """Chance decides between loads alone: a group that has less of the prompt is not as good."""
        margin = NEAR_REQUESTS * _weights(groups)[1]
        if not request.overlaps:
            if groups.home is not None and costs[groups.home] == costs[costs.argmin()]:
                return [groups.home]
            return within(costs, margin * request.cost_tokens)
        most = _credit(groups, request, int(costs.argmin()))
        near = within(costs, margin * max(0.0, request.cost_tokens - most))
        return [index for index in near if _credit(groups, request, index) >= most]

    def sent(self, group: str) -> None:
        """Implements RoutingPolicy."""


def _credit(groups: GroupLoads, request: RouteHint, index: int) -> float:
    """Returns the tokens of prefill that a group saves, as it has some of the prompt's KV."""
    return _saved(groups, index, *request.overlaps.get(groups.groups[index], (0, 0)))


def _all_saved(groups: GroupLoads, request: RouteHint) -> list[float]:
    """Returns the credits of all groups. A loop over numbers of Python: most requests have few overlaps, and each is an
    entry of a dictionary."""
    saved, places = [0.0] * len(groups.groups), groups.places
    for group, (device, below) in request.overlaps.items():
        if (index := places.get(group)) is not None:
            saved[index] = _saved(groups, index, device, below) if below else device
    return saved


def _saved(groups: GroupLoads, index: int, device: int, below: int) -> float:
    return device + (1.0 - groups.copy_share_of(index)) * below


def _load(groups: GroupLoads, more: float) -> CostsG:
    """Tokens to come in each group, as they count for the request's tenant, and `more` in each."""
    of_own, of_others = _weights(groups)
    costs: CostsG = of_others * groups.outstanding
    costs += more
    if of_own != of_others:
        costs += (of_own - of_others) * groups.own  # which are among all too
    return costs


def _weights(groups: GroupLoads) -> tuple[float, float]:
    """Weights of the tenant's own tokens from this gateway, and of all others.

    With one tenant what other gateways have sent counts less, as it is known late: half as much as what is known
    exactly, from LATE_WEIGHT of the news on, and both together as much as there is. Where several tenants share rows, a
    request waits for its own tenant's first, so others count half. Of a tenant above its share they count as they are,
    wholly from twice the share or halfway between it and all: a flood is not to push others off their groups. Never
    more than its own, which would have two gateways drive each other's part of one flood from group to group.
    """
    if groups.tenants > 1:
        excess = _excess(groups)
        return 1.0, 0.5 + excess / 2.0
    doubt = min(1.0, LATE_WEIGHT * groups.late_share)
    of_others = 1.0 / (1.0 + doubt * (1.0 - groups.late_share))
    return (1.0 + doubt) * of_others, of_others


def _excess(groups: GroupLoads) -> float:
    """Measure of how far the tenant is above its share of all tokens, from 0 to 1."""
    share, total = 1.0 / groups.tenants, int(groups.outstanding.sum())
    above = int(groups.own.sum()) / total - share if total else 0.0
    return min(1.0, max(0.0, above / min(share, (1.0 - share) / 2.0)))
