"""Residency of adapters in groups, from their reports and from this gateway's own choices.

A group that was just sent a request loads the adapter that it names; until its report has caught up that counts as on
its device, or a burst for one adapter would make every group load it. Kept by the Serve router; one per gateway
process, one thread.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

KEY_CHARS = 16
EXPECTED_S = 6.0
"""Three periods of reports: longer than an adapter takes from its source, unless that is slow."""
MOST_HOMES = 4096
_ODD = np.uint64(0x9E3779B97F4A7C15)


class Tier(Enum):
    """The place where a group has an adapter, or that it is the one to load it if no group has."""

    DEVICE = "device"
    HOST = "host"
    HOME = "home"


def adapter_key(digest: str) -> str:
    """The name of an adapter in reports: the beginning of its digest."""
    return digest[:KEY_CHARS]


def home_of(key: str, groups: Sequence[str]) -> str:
    """The group that an adapter which no group holds should go to: all gateways agree, adapters spread evenly, and when
    a group comes or goes only its share moves (rendezvous hashing)."""
    return groups[_highest(key, _hashes(groups))]


class Homes:
    """Homes of adapters among a set of groups, remembered until that changes."""

    def __init__(self) -> None:
        self._groups: list[str] = []
        self._hashes = _hashes([])
        self._homes: dict[str, str] = {}

    def set_groups(self, groups: Iterable[str]) -> None:
        """The groups from now on, in any order."""
        if (after := sorted(groups)) != self._groups:
            self._groups, self._hashes = after, _hashes(after)
            self._homes.clear()

    def home(self, key: str) -> str:
        """home_of the adapter among the groups, of which there is at least one. O(groups) when it is new."""
        home = self._homes.get(key)
        if home is None:
            if len(self._homes) >= MOST_HOMES:
                self._homes.clear()
            home = self._homes[key] = self._groups[_highest(key, self._hashes)]
        return home


class Residency:
    """Groups by the adapters that they have. sent() and report() take notes, holders() answers."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
        self._holders: dict[str, dict[str, Tier]] = {}
        self._sent: dict[tuple[str, str], None] = {}
        self._expected: dict[str, dict[str, float]] = {}

    def report(self, group: str, on_device: Sequence[str] = (), on_host: Sequence[str] = ()) -> None:
        """A group's report: keys of adapters. It costs next to nothing while that has not changed."""
        before = self._reports.get(group, ((), ()))
        if before == (on_device, on_host):
            return
        self._forget_report(group)
        self._reports[group] = on_device, on_host
        for key in on_host:
            self._holders.setdefault(key, {})[group] = Tier.HOST
        for key in on_device:
            self._holders.setdefault(key, {})[group] = Tier.DEVICE

    def sent(self, group: str, key: str, now_s: float) -> None:
        """A request that names the adapter goes to the group."""
        self._sent.pop((group, key), None)
        self._sent[group, key] = None
        self._expected.setdefault(key, {})[group] = now_s
        while self._sent:  # in the order of their times
            oldest = next(iter(self._sent))
            if self._expected[oldest[1]][oldest[0]] >= now_s - EXPECTED_S:
                return
            self._forget_sent(*oldest)

    def holders(self, key: str, now_s: float) -> Mapping[str, Tier]:
        """The groups that have the adapter, or will have it soon: DEVICE or HOST. O(its holders)."""
        held, expected = self._holders.get(key, {}), self._expected.get(key)
        if not expected:
            return held
        soon = {group: Tier.DEVICE for group, at_s in expected.items() if now_s - at_s <= EXPECTED_S}
        return {**held, **soon}

    def keep_only(self, groups: Iterable[str]) -> None:
        """Forgets groups that are gone."""
        alive = set(groups)
        for group in [group for group in self._reports if group not in alive]:
            self._forget_report(group)
        for group, key in [sent for sent in self._sent if sent[0] not in alive]:
            self._forget_sent(group, key)

    def _forget_report(self, group: str) -> None:
        on_device, on_host = self._reports.pop(group, ((), ()))
        for key in {*on_device, *on_host}:
            holders = self._holders[key]
            holders.pop(group, None)
            if not holders:
                del self._holders[key]

    def _forget_sent(self, group: str, key: str) -> None:
        del self._sent[group, key], self._expected[key][group]
        if not self._expected[key]:
            del self._expected[key]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _hashes(names: Iterable[str]) -> NDArray[np.uint64]:
    return np.array([_hash(name) for name in names], np.uint64)


def _highest(key: str, hashes: NDArray[np.uint64]) -> int:
    """The place of the highest of the hashes, each mixed with the key's. Arithmetic, which wraps at 64 bits: hashing
    each pair takes ten times as long."""
    return int(((hashes ^ np.uint64(_hash(key))) * _ODD).argmax())
