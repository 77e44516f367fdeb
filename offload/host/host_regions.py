"""The memory of the host tier: regions of anonymous files (memfd), their users, and the budget over all of them.

A region is one index and one slab per rank. It is free only when it has no user left: a frozen rank that may still
write keeps its region from the next group. Used only by host_server.py, from its loop and, for leases, which take
seconds, from threads. It never reads or writes the memory.

    (new, zeros) -> leased [owner + ranks] -> free -> leased again, content kept
                                              free -> evicted, the least recently freed first, when room is needed
"""

import errno
import fcntl
import os
import secrets
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tandem.offload.host.host_messages import Attach, HostStatus, HostTierError, LeaseRegion

MAX_REGIONS = 64
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

OWNER = -1


@dataclass(eq=False)
class Region:
    """One region. users: connection -> rank, OWNER for the coordinator. token: of the current or last lease."""

    layout: str
    index_bytes: int
    rank_bytes: list[int]
    index: int
    slabs: list[int]
    token: str = ""
    freed_at: int = 0
    users: dict[int, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        return self.index_bytes + sum(self.rank_bytes)

    def fits(self, request: LeaseRegion) -> bool:
        return (self.layout, self.index_bytes, self.rank_bytes) == (
            request.layout,
            request.index_bytes,
            request.rank_bytes,
        )

    def close(self) -> None:
        """Closes the descriptors. The memory itself ends with its last user."""
        for descriptor in (self.index, *self.slabs):
            os.close(descriptor)


class Regions:
    """All regions of one node. A user is a connection's number and has at most one region.

    Thread-safe. One lease is made at a time; other calls proceed while the kernel reserves its memory.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._regions: list[Region] = []
        self._region_of: dict[int, Region] = {}
        self._frees = 0
        self._leasing = threading.Lock()  # held to make or choose a region; taken before _lock
        self._lock = threading.Lock()

    def lease(self, user: int, request: LeaseRegion) -> tuple[Region, bool]:
        """Returns a region for this coordinator and whether it has earlier content. HostTierError with the reason if
        there is none."""
        with self._leasing:
            with self._lock:
                self._check_has_no_region(user)
                free = [region for region in self._free() if region.fits(request)]
                region = free[-1] if free else None  # the most recently freed has the most useful content
                if region is None:
                    self._make_room(request)
            reused = region is not None
            region = region or self._make(request)
            with self._lock:
                if not reused:
                    self._regions.append(region)
                region.token = secrets.token_hex(16)
                self._add_user(user, region, OWNER)
            return region, reused

    def attach(self, user: int, request: Attach) -> tuple[int, int]:
        """Returns (descriptor, bytes) of a rank's slab. HostTierError for an unknown token or rank, or a slab in
        use."""
        with self._lock:
            self._check_has_no_region(user)
            for region in self._regions:
                if region.token == request.token and OWNER in region.users.values():
                    break
            else:
                raise HostTierError("no lease has this token, or its coordinator has gone")
            if request.rank >= len(region.slabs):
                raise HostTierError(f"no rank {request.rank} in a region of {len(region.slabs)} ranks")
            if request.rank in region.users.values():
                raise HostTierError(f"another process holds the slab of rank {request.rank}")
            self._add_user(user, region, request.rank)
        return region.slabs[request.rank], region.rank_bytes[request.rank]

    def release(self, user: int) -> None:
        """Ends a connection's claim: its process has unmapped the memory, or has ended."""
        with self._lock:
            region = self._region_of.pop(user, None)
            if region is None:
                return
            del region.users[user]
            if not region.users:
                self._frees += 1
                region.freed_at = self._frees

    def status(self) -> HostStatus:
        """Returns the counts, without a region that is being made."""
        with self._lock:
            total_bytes = self._total_bytes()
            return HostStatus(len(self._regions), self._leases(), len(self._region_of), total_bytes, self._budget_bytes)

    def close(self) -> None:
        with self._lock:
            for region in self._regions:
                region.close()
            self._regions.clear()
            self._region_of.clear()

    # ---- inside ----

    def _check_has_no_region(self, user: int) -> None:
        if user in self._region_of:
            raise HostTierError("this connection holds a region already")

    def _add_user(self, user: int, region: Region, rank: int) -> None:
        region.users[user] = rank
        self._region_of[user] = region

    def _free(self) -> list[Region]:
        """Returns the regions without users, the least recently freed first."""
        return sorted((r for r in self._regions if not r.users), key=lambda region: region.freed_at)

    def _total_bytes(self) -> int:
        return sum(region.total_bytes for region in self._regions)

    def _leases(self) -> int:
        return len(self._regions) - len(self._free())

    def _make_room(self, request: LeaseRegion) -> None:
        """Evicts free regions until the new one fits. HostTierError when it cannot fit."""
        size = _size(request)
        self._check_can_fit(size)
        while (
            self._total_bytes() + size > self._budget_bytes
            or len(self._regions) >= MAX_REGIONS
            or available_bytes() < size
        ):
            if not self._evict():
                raise HostTierError(f"{size} bytes do not fit")

    def _make(self, request: LeaseRegion) -> Region:
        """Allocates a region, which is added to the list by the caller. Runs without the lock: about 0.5 s per GiB."""
        while True:
            try:
                return _allocate(request)
            except OSError as error:
                with self._lock:
                    if error.errno not in _NO_ROOM or not self._evict():
                        raise HostTierError(f"no {_size(request)} bytes of memory: {error.strerror}") from error

    def _check_can_fit(self, size: int) -> None:
        """Raises HostTierError, before anything is evicted, when evicting all free regions would not make room."""
        free_bytes = sum(region.total_bytes for region in self._free())
        leased_bytes = self._total_bytes() - free_bytes
        if leased_bytes + size > self._budget_bytes:
            raise HostTierError(
                f"{size} bytes do not fit: the host tier may take {self._budget_bytes} bytes, {leased_bytes} are leased"
            )
        if available_bytes() + free_bytes < size:
            raise HostTierError(f"{size} bytes do not fit: {available_bytes()} bytes of memory are available")
        if self._leases() >= MAX_REGIONS:
            raise HostTierError(f"{MAX_REGIONS} regions are leased")

    def _evict(self) -> bool:
        """Ends the least recently freed region; returns False when none is free."""
        free = self._free()
        if free:
            self._regions.remove(free[0])
            free[0].close()
        return bool(free)


def available_bytes() -> int:
    """Returns the kernel's MemAvailable in bytes."""
    # Taking more than that would not fail: the kernel would kill some process.
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**63


def _size(request: LeaseRegion) -> int:
    return request.index_bytes + sum(request.rank_bytes)


def _allocate(request: LeaseRegion) -> Region:
    """Allocates the index and the slabs. OSError leaves nothing behind."""
    with ExitStack() as undo:
        descriptors = []
        for size in (request.index_bytes, *request.rank_bytes):
            descriptor = os.memfd_create("tandem-host-tier", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, descriptor)
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)  # no user can shrink it under another
            descriptors.append(descriptor)
        undo.pop_all()
    return Region(request.layout, request.index_bytes, request.rank_bytes, descriptors[0], descriptors[1:])
