"""The memory of the host tier: regions of anonymous files (memfd), who holds them, and the budget over all.

A region is one index and one slab per rank. It is free only when nobody holds it any more: a frozen rank that may still
write keeps its region from the next group. Used by host_server.py alone; never reads or writes the memory.

    (new, zeros) -> leased [owner + ranks] -> free -> leased again, content kept
                                              free -> evicted, the least recently freed first, when room is needed
"""

import errno
import fcntl
import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from offload.host_messages import Attach, HostStatus, HostTierError, Lease

MAX_REGIONS = 64
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

OWNER = -1


@dataclass(eq=False)
class Region:
    """holders: connection -> rank, OWNER for the coordinator. token: of the lease in force or the last one."""

    layout: str
    index_bytes: int
    rank_bytes: list[int]
    index: int
    slabs: list[int]
    token: str = ""
    freed_at: int = 0
    holders: dict[int, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.index_bytes + sum(self.rank_bytes)

    def fits(self, ask: Lease) -> bool:
        return (self.layout, self.index_bytes, self.rank_bytes) == (ask.layout, ask.index_bytes, ask.rank_bytes)

    def close(self) -> None:
        """The memory itself ends with its last user."""
        for descriptor in (self.index, *self.slabs):
            os.close(descriptor)


class Regions:
    """All regions of one node. A holder is a connection's number; each holds at most one region."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._regions: list[Region] = []
        self._held: dict[int, Region] = {}
        self._frees = 0

    def lease(self, holder: int, ask: Lease) -> tuple[Region, bool]:
        """A region for this coordinator and whether it has earlier content. HostTierError says why there is none."""
        self._check_holds_nothing(holder)
        free = [region for region in self._free() if region.fits(ask)]
        region = free[-1] if free else self._make(ask)  # the most recently freed has the most useful content
        region.token = secrets.token_hex(16)
        self._hold(holder, region, OWNER)
        return region, bool(free)

    def attach(self, holder: int, ask: Attach) -> tuple[int, int]:
        """(descriptor, bytes) of a rank's slab."""
        self._check_holds_nothing(holder)
        for region in self._regions:
            if region.token == ask.token and OWNER in region.holders.values():
                break
        else:
            raise HostTierError("no lease has this token, or its coordinator has gone")
        if ask.rank >= len(region.slabs):
            raise HostTierError(f"no rank {ask.rank} in a region of {len(region.slabs)} ranks")
        if ask.rank in region.holders.values():
            raise HostTierError(f"another process holds the slab of rank {ask.rank}")
        self._hold(holder, region, ask.rank)
        return region.slabs[ask.rank], region.rank_bytes[ask.rank]

    def release(self, holder: int) -> None:
        """The connection is closed: its process has let go of the memory, or ended."""
        region = self._held.pop(holder, None)
        if region is None:
            return
        del region.holders[holder]
        if not region.holders:
            self._frees += 1
            region.freed_at = self._frees

    def status(self) -> HostStatus:
        leases = len(self._regions) - len(self._free())
        return HostStatus(len(self._regions), leases, len(self._held), self._total_bytes(), self._budget_bytes)

    def close(self) -> None:
        for region in self._regions:
            region.close()
        self._regions.clear()
        self._held.clear()

    # ---- inside ----

    def _check_holds_nothing(self, holder: int) -> None:
        if holder in self._held:
            raise HostTierError("this connection holds a region already")

    def _hold(self, holder: int, region: Region, rank: int) -> None:
        region.holders[holder] = rank
        self._held[holder] = region

    def _free(self) -> list[Region]:
        """Regions that nobody holds, the least recently freed first."""
        return sorted((r for r in self._regions if not r.holders), key=lambda region: region.freed_at)

    def _total_bytes(self) -> int:
        return sum(region.total_bytes for region in self._regions)

    def _make(self, ask: Lease) -> Region:
        """A new region, evicting free ones as far as that helps."""
        size = ask.index_bytes + sum(ask.rank_bytes)
        self._check_can_fit(size)
        while (
            self._total_bytes() + size > self._budget_bytes
            or len(self._regions) >= MAX_REGIONS
            or available_bytes() < size
        ):
            if not self._evict():
                raise HostTierError(f"{size} bytes do not fit")
        while True:
            try:
                region = _allocate(ask)
            except OSError as error:
                if error.errno not in _NO_ROOM or not self._evict():
                    raise HostTierError(f"no {size} bytes of memory: {error.strerror}") from error
            else:
                self._regions.append(region)
                return region

    def _check_can_fit(self, size: int) -> None:
        """HostTierError when it would not, whatever is evicted: then nothing is."""
        free_bytes = sum(region.total_bytes for region in self._free())
        leased_bytes = self._total_bytes() - free_bytes
        if leased_bytes + size > self._budget_bytes:
            raise HostTierError(
                f"{size} bytes do not fit: the host tier may take {self._budget_bytes} bytes, {leased_bytes} are leased"
            )
        if available_bytes() + free_bytes < size:
            raise HostTierError(f"{size} bytes do not fit: {available_bytes()} bytes of memory are available")
        if self.status().leases >= MAX_REGIONS:
            raise HostTierError(f"{MAX_REGIONS} regions are leased")

    def _evict(self) -> bool:
        """Ends the least recently freed region; False when none is free."""
        free = self._free()
        if free:
            self._regions.remove(free[0])
            free[0].close()
        return bool(free)


def available_bytes() -> int:
    """What the kernel says can be taken without harm: taking more would not fail, it would kill some process."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63


def _allocate(ask: Lease) -> Region:
    """OSError leaves nothing behind."""
    with ExitStack() as undo:
        descriptors = []
        for size in (ask.index_bytes, *ask.rank_bytes):
            descriptor = os.memfd_create("tandem-host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # no holder can cut it short under another
            descriptors.append(descriptor)
        undo.pop_all()
    return Region(ask.layout, ask.index_bytes, ask.rank_bytes, descriptors[0], descriptors[1:])
