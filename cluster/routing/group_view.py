"""Immutable views of each group and of the request, for routing policies. Independent of Ray."""

import msgspec

from tandem.cluster.routing.residency import Tier

STALLS_AFTER_S = 2.0


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """One group at one moment. Tokens are prompt + allowed output of requests that have not ended.

    outstanding_here: those this gateway sent. outstanding_elsewhere: those of other gateways, as last reported.
    stalled_s: how long it has made no progress although it has work, as last reported. missing: its record and its
    tokens no longer reach this gateway. adapter: where it has the adapter of the request that is routed; without one:
    NONE.
    """

    group: str
    outstanding_here: int = 0
    outstanding_elsewhere: int = 0
    kv_used: float = 0.0
    stalled_s: float = 0.0
    missing: bool = False
    adapter: Tier = Tier.NONE

    @property
    def stalls(self) -> bool:
        """True when it may be frozen or stuck; a step this long is slow at best."""
        return self.missing or self.stalled_s >= STALLS_AFTER_S

    @property
    def outstanding_tokens(self) -> int:
        return self.outstanding_here + self.outstanding_elsewhere


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a request that routing uses. `cost_tokens`: prompt + allowed output of all choices. adapter: its key
    (residency.adapter_key), None without one. gateway: the one that sends it."""

    request_id: str
    cost_tokens: int
    gateway: str = ""
    adapter: str | None = None
