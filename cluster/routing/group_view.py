"""What a routing policy sees: one immutable picture of each group, and of the request. Knows no Ray."""

import msgspec

from cluster.routing.residency import Tier

STALLS_AFTER_S = 2.0


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group at one moment. Tokens are prompt + allowed output of requests that have not ended.

    outstanding_here: those this gateway sent. outstanding_elsewhere: those of other gateways, as last reported.
    stalled_s: how long nothing had moved there although something should have, as last reported. vanished: this gateway
    hears nothing of it any more. adapter: where it has the adapter of the request that is routed; without one: NONE.
    """

    group: str
    outstanding_here: int = 0
    outstanding_elsewhere: int = 0
    kv_used: float = 0.0
    stalled_s: float = 0.0
    vanished: bool = False
    adapter: Tier = Tier.NONE

    @property
    def stalls(self) -> bool:
        """It may be frozen or stuck; a step this long is slow at best."""
        return self.vanished or self.stalled_s >= STALLS_AFTER_S

    @property
    def outstanding_tokens(self) -> int:
        return self.outstanding_here + self.outstanding_elsewhere


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """What of a request matters for routing. `cost_tokens`: prompt + allowed output of all choices. adapter: its key
    (residency.adapter_key), None without one. gateway: the one that sends it."""

    request_id: str
    cost_tokens: int
    gateway: str = ""
    adapter: str | None = None
