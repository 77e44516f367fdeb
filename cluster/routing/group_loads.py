"""GroupLoads: the groups that may take a request, in columns, for routing policies. Independent of Ray.

The columns of names and of loads elsewhere are made once per report of the groups, not per request (RouterReports).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.cluster.routing.residency import Tier

TokensG = NDArray[np.int64]
"""Tokens by group."""
CostsG = NDArray[np.floating[Any]]
"""Costs by group."""

STALLS_AFTER_S = 2.0
"""A group that has made no progress for so long although it has work may be frozen or stuck; a step this long is slow
at best."""
UNMEASURED_COPY_SHARE = 0.25
"""Taken for the copy share of a group that has not measured it."""


class GroupLoads(msgspec.Struct, frozen=True, kw_only=True):
    """The groups at one moment, for one request. A group is its index in the columns."""

    groups: Sequence[str]  # their ids
    outstanding: TokensG  # their tokens to come: prompts and expected output of requests that have not ended
    own: TokensG  # those of the request's tenant, as far as this gateway has sent them
    # groups to choose only when there is no other: their record no longer reaches the gateway, they have refused the
    # request, are taken down, or stall
    last: Collection[int] = ()
    # groups that have the request's adapter, and its home if that has it not; empty without an adapter
    tiers: Mapping[Tier, Collection[int]] = {}
    # seconds to load a token's KV from below the device over seconds to compute it; empty: nobody has measured it
    copy_share: Sequence[float] = ()
    # share of all tokens to come that other gateways have sent, of which this one hears seconds late
    late_share: float = 0.0
    # tenants with tokens to come, of those that this gateway has sent
    tenants: int = 1
    # the group that is home to the request's session, if it has one (residency.home_of)
    home: int | None = None
    # indices by id, where the caller has them
    index: Mapping[str, int] = {}

    @property
    def places(self) -> Mapping[str, int]:
        """Indices by id. O(groups) unless the caller has given them."""
        return self.index or {group: place for place, group in enumerate(self.groups)}

    def copy_share_of(self, place: int) -> float:
        """The copy share of a group, from 0 (loading is free) to 1 (computing takes no longer)."""
        return min(1.0, max(0.0, self.copy_share[place])) if self.copy_share else UNMEASURED_COPY_SHARE
