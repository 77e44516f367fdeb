"""Residency of adapters in groups, from their reports and from this gateway's own choices.

A group that was just sent a request loads the adapter that it names; until its report has caught up that counts as on
its device, or a burst for one adapter would make every group load it. Kept by the Serve router; one per gateway
process, one thread.
"""

import hashlib
from collections.abc import Collection, Iterable
from enum import Enum

KEY_CHARS = 16
EXPECTED_S = 6.0
"""Three periods of reports: longer than an adapter takes from its source, unless that is slow."""


class Tier(Enum):
    """Where a group has an adapter, or that it is the one to load it if no group has."""

    DEVICE = "device"
    HOST = "host"
    HOME = "home"
    NONE = "none"


def adapter_key(digest: str) -> str:
    """The name of an adapter in reports: the beginning of its digest."""
    return digest[:KEY_CHARS]


def home_of(key: str, groups: Iterable[str]) -> str:
    """The group that an adapter which no group holds should go to: all gateways agree, adapters spread evenly, and when
    a group comes or goes only its share moves (rendezvous hashing)."""
    return max(groups, key=lambda group: hashlib.blake2b(f"{key} {group}".encode(), digest_size=8).digest())


class Residency:
    """Times of this gateway's requests by group and adapter key."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, str], float] = {}

    def sent(self, group: str, key: str, now_s: float) -> None:
        """A request that names the adapter goes to the group."""
        self._sent.pop((group, key), None)
        self._sent[(group, key)] = now_s
        while self._sent:  # in the order of their times
            oldest = next(iter(self._sent))
            if self._sent[oldest] >= now_s - EXPECTED_S:
                return
            del self._sent[oldest]

    def tier(
        self, group: str, key: str, now_s: float, on_device: Collection[str] = (), on_host: Collection[str] = ()
    ) -> Tier:
        """DEVICE, HOST or NONE: a home is only known among all groups. on_device, on_host: the group's last report."""
        if key in on_device or now_s - self._sent.get((group, key), float("-inf")) <= EXPECTED_S:
            return Tier.DEVICE
        return Tier.HOST if key in on_host else Tier.NONE

    def keep_only(self, groups: Iterable[str]) -> None:
        """Forgets groups that are gone."""
        alive = set(groups)
        self._sent = {key: at for key, at in self._sent.items() if key[0] in alive}
