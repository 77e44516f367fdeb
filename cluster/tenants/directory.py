"""Each gateway's own copy of the tenants: which key is whose, and what each may take.

A copy of the durable map (map_copy.py), saved in a file for the gateway's next life. A service that once had a tenant
or a key has an id of its tenants, and is closed for good.

    unknown --first reading--> certain --Redis unavailable, or 2 s--> uncertain (known keys go on) --reading--> certain
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tandem.cluster.state.durable_map import DurableMap
from tandem.cluster.state.epoch import Epoch
from tandem.cluster.state.map_copy import MapCopy
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.tenants.store import TenantStore
from tandem.cluster.tenants.tenant import Tenant

POLL_S = 0.5
SUBSCRIBED_POLL_S = 1.0
"""While changes are announced: well below CERTAIN_S, because only a poll confirms that nothing has changed."""
CERTAIN_S = 2.0
"""A key that is not in a reading does not exist for this time after it: a frozen Redis may take long to fail."""


class SavedTenants(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    # the epoch of the tenants
    origin: str | None
    version: int
    tenants: list[Tenant]
    spent: dict[str, tuple[int, int]] = {}  # of each tenant's budget: its id, and its tokens
    unreadable: int = 0  # as in Reading


class TenantDirectory(MapCopy[Tenant]):
    """`file`: where the copy is saved, None: nowhere. has_keys: the service has keys beside those of tenants, which
    closes it also for later lives."""

    SAVED = SavedTenants

    def __init__(
        self,
        store: TenantStore,
        file: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        has_keys: bool = False,
    ) -> None:
        super().__init__(store, file)
        self._wall_clock = wall_clock
        self._clock = clock
        self._has_keys = has_keys
        self._read_s = -math.inf
        self._by_digest: dict[str, tuple[str, float | None]] = {}
        self.closing = asyncio.Event()
        self.saved_spent: Mapping[str, tuple[int, int]] = {}

    # ---- called by requests: never waits --------------------------------------------------------------------------

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        return self.values

    @property
    def is_certain(self) -> bool:
        return self._clock() - self._read_s < CERTAIN_S

    @property
    def is_closed(self) -> bool:
        """There is, or once was, a tenant or a key: the service is never open again, whoever lost or removed them."""
        return self.id is not None

    def tenant_of(self, digest: bytes) -> str | None:
        """The tenant whose key has this SHA-256. The digest of a random key gives nothing away by how long its lookup
        takes."""
        found = self._by_digest.get(digest.hex())
        if found is None or (found[1] is not None and found[1] <= self._wall_clock()):
            return None
        return found[0]

    # ---- kept up to date -----------------------------------------------------------------------------------------

    def _adopt_saved(self, saved: SavedTenants) -> None:
        self.saved_spent = saved.spent
        if saved.origin is not None:
            self.adopt({tenant.name: tenant for tenant in saved.tenants}, saved.origin, saved.unreadable)

    async def refresh(self) -> bool:
        """Reads what has changed; True if anything had. RedisUnavailable: the copy stays, and keys that it does not
        hold are uncertain."""
        began_s = self._clock()
        try:
            has_changed = await super().refresh()
        except RedisUnavailable:
            self._read_s = -math.inf
            raise
        self._read_s = began_s
        return has_changed

    async def run(self, period_s: float = POLL_S, changes: Announcements = Announcements()) -> None:
        """Refreshes until it is cancelled, see follow()."""
        await self.follow(lambda: None, period_s, SUBSCRIBED_POLL_S, changes)

    async def save(self, spent: Mapping[str, tuple[int, int]]) -> None:
        """Writes the copy to the file when that differs. It holds hashes of keys, and is its owner's only.

        All gateways of a service write there, each its own copy: of a budget the most that was spent stays.
        """
        known = dict(spent)
        await self._save(lambda there: self._saved(there, known))

    def _saved(self, there: SavedTenants | None, spent: Mapping[str, tuple[int, int]]) -> SavedTenants:
        """The copy at the moment of writing (on a thread), and the file's counts of budgets that are counted now. When
        that is not known, a later budget replaces an earlier one. Where another gateway has written tenants of which
        this one has not heard, they stay: with them the service stays closed."""
        if self.id is None and there is not None and there.origin is not None:
            return msgspec.structs.replace(there, spent=_most(spent, there.spent, None))
        tenants = self.tenants
        is_whole = self.is_certain and not self.unreadable
        budgets = {name: tenant.budget_id for name, tenant in tenants.items()} if is_whole else None
        return SavedTenants(
            origin=self.id,
            version=self._known.counter if self._known is not None else 0,
            tenants=[tenants[name] for name in sorted(tenants)],
            spent=_most(spent, there.spent if there is not None else {}, budgets),
            unreadable=self.unreadable,
        )

    async def _repair(self, map: DurableMap[Tenant], there: Epoch) -> None:
        await super()._repair(map, there)
        if self._has_keys and there.id is None and self.id is None:
            self._known = (await map.seed({}, None, only_new=True)).epoch

    def _on_taken(self) -> None:
        self._by_digest = {key.digest: (t.name, key.expires_s) for t in self.tenants.values() for key in t.keys}
        if self.is_closed:
            self.closing.set()


def _most(
    one: Mapping[str, tuple[int, int]], other: Mapping[str, tuple[int, int]], budgets: Mapping[str, int] | None
) -> dict[str, tuple[int, int]]:
    """The larger count of each budget. budgets: ids of those that count; None: the latest of both."""
    most: dict[str, tuple[int, int]] = {}
    for name, known in [*one.items(), *other.items()]:
        if budgets is None or budgets.get(name) == known[0]:
            most[name] = max(known, most.get(name, known))
    return most
