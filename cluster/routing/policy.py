"""Which group should take a request: a policy scores every group, the highest score is tried first.

Pure functions of the views; the Serve router calls them and falls back to no preference when one raises.
"""

from collections.abc import Sequence
from typing import Protocol

from cluster.routing.group_view import GroupView, RequestView


class RoutingPolicy(Protocol):
    """Scores groups for one request."""

    def scores(self, groups: Sequence[GroupView], request: RequestView) -> list[float]:
        """One score per group, in the order given; higher is better."""
        ...


class LeastOutstandingTokens:
    """The group with the fewest tokens still to come: a long answer weighs more than many short ones."""

    def scores(self, groups: Sequence[GroupView], request: RequestView) -> list[float]:
        return [-float(group.outstanding_tokens) for group in groups]


def best_first(policy: RoutingPolicy, groups: Sequence[GroupView], request: RequestView) -> list[int]:
    """Indices of `groups`, best first, groups that stall last whatever their score; equal scores keep a fixed order by
    group id, so that gateways agree."""
    scores = policy.scores(groups, request)
    assert len(scores) == len(groups), "a policy scores every group"
    return sorted(range(len(groups)), key=lambda i: (groups[i].stalls, -scores[i], groups[i].group))
