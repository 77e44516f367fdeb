"""RouteTable: why a request goes to a group: the costs of all groups, and what they are made of.

Made by the router for who asks with an admin key: the header `x-tandem-route: explain`, and `tandem routes explain`.
"""

from collections.abc import Mapping

import msgspec

from tandem.cluster.routing.group_loads import CostsG, GroupLoads
from tandem.cluster.routing.route_hint import RouteHint


class GroupCost(msgspec.Struct, frozen=True, kw_only=True):
    """One group as a request sees it. Tokens but for `cost`, whose unit is the policy's."""

    group: str
    cost: float
    outstanding: int
    device: int = 0  # of the prompt's KV, on the device
    below: int = 0  # and below it only
    adapter: str = "-"  # "device", "host", "home" (to be loaded there, if nowhere else), or "none"; "-" without one
    is_home: bool = False  # of the session
    is_last: bool = False  # only if there is no other


class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """All groups for one request, the cheapest first; those to choose last are last."""

    policy: str
    cost_tokens: int  # of the request: prompt and expected output
    groups: list[GroupCost]

    def line(self, chosen: str) -> str:
        """Says in a line what the chosen group has, and which would have been second (`-`: none)."""
        others = [one.group for one in self.groups if one.group != chosen]
        has = {one.group: one for one in self.groups}.get(chosen)
        second = others[0] if others else "-"
        if has is None:
            return f"{chosen} second={second}"
        return (
            f"{chosen} overlap={has.device}+{has.below} outstanding={has.outstanding} adapter={has.adapter} "
            f"second={second}"
        )


class RouteNote(msgspec.Struct):
    """Note on one request that asks why it goes where it goes."""

    table: RouteTable | None = None
    group: str = ""

    @property
    def line(self) -> str | None:
        """The table's line; None while no group is chosen."""
        return self.table.line(self.group) if self.table is not None and self.group else None


def route_table(policy: str, costs: CostsG, groups: GroupLoads, request: RouteHint) -> RouteTable:
    """Makes the table. policy: its name; costs: its, by group."""
    tiers = {index: tier.value for tier, indices in groups.tiers.items() for index in indices}
    last, none = set(groups.last), "-" if request.adapter is None else "none"
    no_overlap = (0, 0)
    overlaps: Mapping[str, tuple[int, int]] = request.overlaps
    found = [
        GroupCost(
            group=group,
            cost=float(costs[index]),
            outstanding=int(groups.outstanding[index]),
            device=overlaps.get(group, no_overlap)[0],
            below=overlaps.get(group, no_overlap)[1],
            adapter=tiers.get(index, none) if request.adapter is not None else none,
            is_home=index == groups.home,
            is_last=index in last,
        )
        for index, group in enumerate(groups.groups)
    ]
    found.sort(key=lambda one: (one.is_last, one.cost, one.group))
    return RouteTable(policy=policy, cost_tokens=request.cost_tokens, groups=found)
