"""Each gateway's own copy of the tenants: which key is whose, and what each may take.

Read again when the version in Redis changes, which is announced and polled for. While Redis is unavailable the copy
goes on serving; when Redis comes back without the tenants, or as it was some changes ago, the copy is written to it
again. A file keeps the copy for the gateway's next life. A service that once had a tenant or a key has an origin, and
is closed for good.

    unknown --first reading--> certain --Redis unavailable, or 2 s--> uncertain (known keys go on) --reading--> certain
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.state.notifications import Announcements, NoAnnouncements
from tandem.cluster.state.redis_client import RedisUnavailable
from tandem.cluster.state.snapshot_file import merge_state, read_state
from tandem.cluster.tenants.store import Mark, Reading, TenantStore
from tandem.cluster.tenants.tenant import NO_LIMITS, Limits, Tenant

log = logging.getLogger("tandem.tenants")
POLL_S = 0.5
SUBSCRIBED_POLL_S = 1.0
"""While changes are announced: well below CERTAIN_S, because only a poll confirms that nothing has changed."""
CERTAIN_S = 2.0
"""For this time after a reading, a key not in it does not exist: a frozen Redis may take long to fail."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The file. spent: tokens of each tenant's budget, with the budget's id. unreadable: as in Reading."""

    origin: str | None
    version: int
    tenants: list[Tenant]
    spent: dict[str, tuple[int, int]] = {}
    unreadable: int = 0


class TenantDirectory:
    """Used on one event loop. `file`: where the copy is kept, None: nowhere. has_keys: the service has keys beside
    those of tenants, which closes it also for later lives."""

    def __init__(
        self,
        store: TenantStore,
        file: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        has_keys: bool = False,
    ) -> None:
        self._store = store
        self._file = file
        self._wall_clock = wall_clock
        self._clock = clock
        self._has_keys = has_keys
        self._read_s = -math.inf
        self._mark: Mark | None = None
        self._origin: str | None = None
        self._by_digest: dict[str, tuple[str, float | None]] = {}
        self._unreadable = 0
        self._refreshing = asyncio.Lock()
        self.closing = asyncio.Event()
        self.tenants: Mapping[str, Tenant] = {}
        self.saved_spent: Mapping[str, tuple[int, int]] = {}
        self.is_known = False

    # ---- called by requests: never waits --------------------------------------------------------------------------

    @property
    def is_certain(self) -> bool:
        return self._clock() - self._read_s < CERTAIN_S

    @property
    def is_closed(self) -> bool:
        """There is, or once was, a tenant or a key: the service is never open again, whoever lost or removed them."""
        return self._origin is not None

    def tenant_of(self, digest: bytes) -> str | None:
        """The tenant whose key has this SHA-256. The digest of a random key gives nothing away by how long its lookup
        takes."""
        found = self._by_digest.get(digest.hex())
        if found is None or (found[1] is not None and found[1] <= self._wall_clock()):
            return None
        return found[0]

    def limits(self, tenant: str) -> Limits:
        known = self.tenants.get(tenant)
        return known.limits if known is not None else NO_LIMITS

    # ---- kept up to date -----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Takes what the file of an earlier life holds, before the first reading."""
        if self._file is None or (saved := await asyncio.to_thread(read_state, self._file, Saved)) is None:
            return
        self.saved_spent = saved.spent
        if saved.origin is not None:
            self._close(saved.origin)
            self._take({tenant.name: tenant for tenant in saved.tenants}, saved.unreadable)

    async def refresh(self) -> None:
        """Reads what has changed. RedisUnavailable: the copy stays, and keys that it does not hold are uncertain."""
        async with self._refreshing:
            began_s = self._clock()
            try:
                await self._refresh()
            except RedisUnavailable:
                self._read_s = -math.inf
                raise
            self._read_s = began_s

    async def run(self, period_s: float = POLL_S, changes: Announcements = NoAnnouncements()) -> None:
        """Refreshes until it is cancelled: when a change is announced, and each period, which may be longer then."""
        while True:
            is_trusting = False
            try:
                await self.refresh()
                is_trusting = changes.is_subscribed
            except RedisUnavailable as error:
                log.debug("tenants were not read: %s", error)
            except Exception:
                log.exception("tenants were not read: going on with the last known ones")
            await changes.wait(keys.TENANTS, max(period_s, SUBSCRIBED_POLL_S) if is_trusting else period_s)

    async def save(self, spent: Mapping[str, tuple[int, int]]) -> None:
        """Writes the copy to the file when that differs. It holds hashes of keys, and is its owner's only.

        All gateways of a service write there, each its own copy: of a budget the most that was spent stays.
        """
        if self._file is not None and self.is_known:
            known = dict(spent)
            await asyncio.to_thread(merge_state, self._file, Saved, lambda there: self._saved(there, known))

    def _saved(self, there: Saved | None, spent: Mapping[str, tuple[int, int]]) -> Saved:
        """The copy at the moment of writing (on a thread), and the file's counts of budgets
        that are counted now. When that is not known, a later budget replaces an earlier one. Where another gateway has
        written tenants of which this one has not heard, they stay: with them the service stays closed."""
        if self._origin is None and there is not None and there.origin is not None:
            return msgspec.structs.replace(there, spent=_most(spent, there.spent, None))
        tenants = self.tenants
        is_whole = self.is_certain and not self._unreadable
        budgets = {name: tenant.budget_id for name, tenant in tenants.items()} if is_whole else None
        return Saved(
            origin=self._origin,
            version=self._mark.version if self._mark is not None else 0,
            tenants=[tenants[name] for name in sorted(tenants)],
            spent=_most(spent, there.spent if there is not None else {}, budgets),
            unreadable=self._unreadable,
        )

    async def _refresh(self) -> None:
        mark = await self._store.mark()
        if self._was_lost(mark):
            assert self._origin is not None
            version = self._mark.version if self._mark is not None else 0
            if await self._store.seed(self._origin, self.tenants.values(), version):
                log.warning("Redis had lost the tenants: %d were written again", len(self.tenants))
        elif self._mark is not None and mark.origin == self._origin and mark.version < self._mark.version:
            if await self._store.restore(mark, self._mark.version, self.tenants):
                log.warning("Redis was an older copy of itself: %d tenants were written again", len(self.tenants))
        elif mark.origin is None and self._has_keys:
            await self._store.found()
        elif mark == self._mark:
            return
        reading: Reading = await self._store.read()
        if reading.mark.origin is None and self._origin is not None:
            raise RedisUnavailable("it lost the tenants at this moment")
        self._mark = reading.mark
        if reading.mark.origin is not None:
            self._close(reading.mark.origin)
        self._take(reading.tenants, reading.unreadable)

    def _was_lost(self, mark: Mark) -> bool:
        """A copy that only a file remembers fills an empty Redis, but does not apply to one with other tenants."""
        if self._origin is None or mark.origin == self._origin:
            return False
        return mark.origin is None or self._mark is not None

    def _close(self, origin: str) -> None:
        self._origin = origin
        self.closing.set()

    def _take(self, tenants: Mapping[str, Tenant], unreadable: int) -> None:
        self.tenants = tenants
        self._unreadable = unreadable
        self._by_digest = {key.digest: (t.name, key.expires_s) for t in tenants.values() for key in t.keys}
        self.is_known = True


def _most(
    one: Mapping[str, tuple[int, int]], other: Mapping[str, tuple[int, int]], budgets: Mapping[str, int] | None
) -> dict[str, tuple[int, int]]:
    """The larger count of each budget. budgets: ids of those that count; None: the latest of both."""
    most: dict[str, tuple[int, int]] = {}
    for name, known in [*one.items(), *other.items()]:
        if budgets is None or budgets.get(name) == known[0]:
            most[name] = max(known, most.get(name, known))
    return most
