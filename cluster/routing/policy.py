"""Which group should take a request: a policy scores every group, the highest score is tried first.

Pure functions of the views; the Serve router calls them and falls back to no preference when one raises.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from tandem.cluster.routing.group_view import GroupView
from tandem.cluster.routing.residency import Tier
from tandem.cluster.routing.route_hint import RouteHint

MISS_TOKENS: Final = 512
"""What loading an adapter from its source is worth in tokens to come, besides MISS_REQUESTS of the request's own size:
with long answers allowed, one request more is no reason to load it elsewhere."""
MISS_REQUESTS: Final = 2
TIER_SHARES: Final[Mapping[Tier, float]] = MappingProxyType(
    {Tier.DEVICE: 0.0, Tier.HOST: 0.25, Tier.HOME: 0.75, Tier.NONE: 1.0}
)


class RoutingPolicy(Protocol):
    """Scores groups for one request."""

    def scores(self, groups: Sequence[GroupView], request: RouteHint) -> list[float]:
        """One score per group, in the order given; higher is better."""
        ...


class LeastOutstandingTokens:
    """The group with the fewest tokens still to come: a long answer weighs more than many short ones."""

    def scores(self, groups: Sequence[GroupView], request: RouteHint) -> list[float]:
        return [-float(group.outstanding_tokens) for group in groups]


class AdapterAffinity:
    """Least outstanding tokens, where a group that would have to load the request's adapter counts as having more.

    So among groups of similar load the request goes where its adapter lies, device before host before none; when those
    have more to do than the others by what a load is worth, one more group gets it: the more popular an adapter, the
    more groups hold it. Requests without an adapter are routed by tokens alone.
    """

    def scores(self, groups: Sequence[GroupView], request: RouteHint) -> list[float]:
        miss = 0.0 if request.adapter is None else MISS_TOKENS + MISS_REQUESTS * request.cost_tokens
        return [-(group.outstanding_tokens + TIER_SHARES[group.adapter] * miss) for group in groups]


def best_first(policy: RoutingPolicy, groups: Sequence[GroupView], request: RouteHint) -> list[int]:
    """Indices of `groups`, best first, groups that stall or should be avoided last whatever their score; equal scores
    keep a fixed order by group id, so that gateways agree."""
    scores = policy.scores(groups, request)
    assert len(scores) == len(groups), "a policy scores every group"
    return sorted(range(len(groups)), key=lambda i: (groups[i].stalls, -scores[i], groups[i].group))
