"""Immutable views of the groups, for routing policies. Independent of Ray."""

import msgspec

from tandem.cluster.routing.residency import Tier

STALLS_AFTER_S = 2.0


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group at one moment. Tokens are prompt + allowed output of requests that have not ended.

    outstanding_here: those this gateway sent. outstanding_elsewhere: those of other gateways, as last reported.
    stalled_s: how long it has made no progress although it has work, as last reported. avoid: the request should not go
    there (its record no longer reaches the gateway, it has refused the request, or it is taken down). adapter: where it
    has the adapter of the request that is routed; without one: NONE.
    """

    group: str
    outstanding_here: int = 0
    outstanding_elsewhere: int = 0
    kv_used: float = 0.0
    stalled_s: float = 0.0
    avoid: bool = False
    adapter: Tier = Tier.NONE

    @property
    def stalls(self) -> bool:
        """True when it may be frozen or stuck; a step this long is slow at best."""
        return self.avoid or self.stalled_s >= STALLS_AFTER_S

    @property
    def outstanding_tokens(self) -> int:
        return self.outstanding_here + self.outstanding_elsewhere
