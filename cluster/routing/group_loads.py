"""GroupLoads: the groups that may take a request, in columns, for routing policies. Independent of Ray.

The columns of names and of loads elsewhere are made once per report of the groups, not per request (serve_router.py).
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from tandem.cluster.routing.residency import Tier

STALLS_AFTER_S = 2.0
"""A group that has made no progress for so long although it has work may be frozen or stuck; a step this long is slow
at best."""


class GroupLoads(msgspec.Struct, frozen=True, kw_only=True):
    """The groups at one moment, for one request. A group is its index in the columns."""

    groups: Sequence[str]  # their ids
    outstanding: Sequence[int]  # their tokens to come: prompt + allowed output of requests that have not ended
    own: Sequence[int]  # those of the request's tenant, as far as this gateway has sent them
    # groups to choose only when there is no other: their record no longer reaches the gateway, they have refused the
    # request, are taken down, or stall
    last: Collection[int] = ()
    # groups that have the request's adapter, and its home if that has it not; empty without an adapter
    tiers: Mapping[Tier, Collection[int]] = {}
