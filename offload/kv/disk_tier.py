"""The disk tier's bookkeeping for one group: keys, order of use, quota, reads and writes in flight. Moves no bytes.

Called by the coordinator from one thread; the ranks read and write the files (disk_io.py). Files outlive the process: a
later group with the same layout recovers them. All ranks' folders must be on one file system.

    <root>/<layout>/<n>/LOCK              held by the one living group that uses n, whose word is in it
    <root>/<layout>/<n>/<rank>/ab/ab...kv

    absent -> writing -> stored <-> pinned (being read)       evicted or failed: absent, its files listed for removal
"""

import fcntl
import logging
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.configs.errors import SettingsError
from tandem.offload.kv.disk_io import list_blocks, remove_block

log = logging.getLogger(__name__)
FLAG = "--kv-disk-path"
MAX_GROUPS = 64
LOCK_NAME = "LOCK"
_PROBE_NAME = "probe"
_PROBE_BYTES = 4096


class DiskTierStats(msgspec.Struct, frozen=True):
    """A snapshot for metrics. keys: the number of findable keys; hits and the later fields count since the tier was
    opened."""

    keys: int
    bytes: int
    capacity_keys: int
    hits: int
    stores: int
    evictions: int
    failures: int


class DiskTier:
    """The index of keys. Every prepare_* that succeeds is followed by exactly one complete_* or fail_* of that key."""

    def __init__(self, place: Path, capacity_keys: int, block_file_bytes: int, keys: Iterable[bytes] = ()) -> None:
        """Starts the index; open_disk_tier is the public way to make one.

        keys: the stored ones, least recently used first. block_file_bytes: summed over all ranks. on_change: is told of
        each key that can be found from now on, or no longer.
        """
        assert capacity_keys > 0 and block_file_bytes > 0
        self.place = place
        self.word = b""
        self.notes: list[str] = []
        self.disabled_reason: str | None = None
        self._capacity = capacity_keys
        self._block_bytes = block_file_bytes
        self._idle = OrderedDict.fromkeys(keys)  # stored and not being read, least recently used first
        self._pins: dict[bytes, int] = {}  # keys being read -> number of readers
        self._doomed: set[bytes] = set()  # among _pins: no longer findable, dropped with the last pin
        self._writing: set[bytes] = set()
        self._remains: set[bytes] = set()  # no longer findable, but some rank may still have a file
        self._hits = self._stores = self._evictions = self._failures = 0
        self._owned = ExitStack()
        self.on_change: Callable[[bytes], None] | None = None
        assert len(self._idle) <= capacity_keys

    # ---- queries ----

    def folder(self, rank_folder: str) -> Path:
        """Returns the folder in which one rank keeps its blocks."""
        return self.place / rank_folder

    def has(self, key: bytes) -> bool:
        """Returns whether prepare_load would pin the key."""
        return key in self._idle or (key in self._pins and key not in self._doomed)

    @property
    def stats(self) -> DiskTierStats:
        keys = len(self._idle) + len(self._pins) - len(self._doomed)
        return DiskTierStats(
            keys, keys * self._block_bytes, self._capacity, self._hits, self._stores, self._evictions, self._failures
        )

    # ---- use ----

    def touch(self, key: bytes) -> None:
        """Marks a stored key as just used, so that it is evicted later. No effect on other keys."""
        if key in self._idle:
            self._idle.move_to_end(key)

    def prepare_store(self, key: bytes) -> list[bytes] | None:
        """Reserves room for a new key and returns the keys whose files the ranks remove before they write this one.

        Those are evicted keys and remains of failures; each rank does its removals and writes in the order in which
        they were issued. None when the key is already stored, being written or read, or when nothing can be evicted.
        """
        if self.disabled_reason is not None or key in self._idle or key in self._pins or key in self._writing:
            return None
        if self._num_held() >= self._capacity:
            if not self._idle:
                return None
            victim, _ = self._idle.popitem(last=False)
            self._remains.add(victim)
            self._evictions += 1
            self._tell(victim)
        self._remains.discard(key)  # its file is about to be replaced
        removed = sorted(self._remains)
        self._remains.clear()
        self._writing.add(key)
        return removed

    def complete_store(self, key: bytes) -> None:
        """Makes the key findable. Every rank has written its file."""
        self._writing.remove(key)
        if self.disabled_reason is None:
            self._idle[key] = None
            self._stores += 1
            self._tell(key)

    def fail_store(self, key: bytes) -> None:
        """Drops the key. Some rank could not write its file, and none is still writing."""
        self._writing.remove(key)
        self._remains.add(key)
        self._failures += 1

    def prepare_load(self, key: bytes) -> bool:
        """Pins the key, so that it is not evicted while ranks read it; calls nest. Returns False when it is not
        stored."""
        if not self.has(key):
            return False
        self._idle.pop(key, None)
        self._pins[key] = self._pins.get(key, 0) + 1
        self._hits += 1
        return True

    def complete_load(self, key: bytes) -> None:
        """Unpins the key, which counts as just used. Every rank has read its file."""
        self._unpin(key)

    def fail_load(self, key: bytes) -> None:
        """Makes the key unfindable: some rank found its file missing or corrupt. Other reads of it finish as usual."""
        assert key in self._pins
        self._doomed.add(key)
        self._failures += 1
        self._unpin(key)
        self._tell(key)

    def forget_all(self) -> None:
        """Makes all keys unfindable; their files go when the ranks write the next one."""
        lost = [*self._idle, *self._pins]
        self._remains.update(self._idle)
        self._idle.clear()
        self._doomed.update(self._pins)
        self._tell(*lost)

    def disable(self, reason: str) -> None:
        """Switches the tier off after a disk failure (full, read-only, broken): it finds and stores nothing from now
        on.

        The first reason is kept and logged. Reads and writes in flight are still completed or failed. Files stay for a
        later start.
        """
        if self.disabled_reason is None:
            log.warning("%s %s is switched off, serving without the disk tier: %s", FLAG, self.place, reason)
            self._switch_off(reason)

    def close(self) -> None:
        """Releases the folder to other groups; this tier finds nothing from now on. Idempotent."""
        if self.disabled_reason is None:
            self._switch_off("closed")
        self._owned.close()

    # ---- inside ----

    def _num_held(self) -> int:
        return len(self._idle) + len(self._pins) + len(self._writing)

    def _unpin(self, key: bytes) -> None:
        pins = self._pins.pop(key) - 1
        if pins:
            self._pins[key] = pins
        elif key in self._doomed:
            self._doomed.remove(key)
            self._remains.add(key)
        else:
            self._idle[key] = None

    def _switch_off(self, reason: str) -> None:
        self.disabled_reason = reason
        lost = [*self._idle, *self._pins]
        self._idle.clear()
        self._doomed.update(self._pins)
        self._tell(*lost)

    def _tell(self, *keys: bytes) -> None:
        if self.on_change is not None:
            for key in keys:
                self.on_change(key)

    def _own(self, lock: "_Lock") -> None:
        self._owned.callback(os.close, lock.descriptor)
        self.word = lock.word

    # ---- invariants, for tests ----

    def check_invariants(self) -> None:
        """Checks that every key is in one state, pins are of stored keys, and files stay within the quota."""
        states = [set(self._idle), set(self._pins), self._writing, self._remains]
        assert sum(map(len, states)) == len(set().union(*states)), "a key is in two states"
        assert self._num_held() <= self._capacity, "more stored and being written than the quota allows"
        assert all(count > 0 for count in self._pins.values()) and self._doomed <= self._pins.keys()
        if self.disabled_reason is None:
            assert self._num_held() + len(self._remains) <= self._capacity, "more files than the quota allows"
        else:
            assert not self._idle and self._doomed == self._pins.keys(), "a disabled tier finds nothing"


class _Lock(NamedTuple):
    """word: in its file, by which ranks of other nodes know the folder for the coordinator's."""

    place: Path
    descriptor: int
    word: bytes


def open_disk_tier(
    root: Path, layout: str, rank_folders: Sequence[str], capacity_bytes: int, block_file_bytes: int
) -> DiskTier:
    """Locks a folder below `root` that no living group uses and recovers the blocks that an earlier group left in it.

    capacity_bytes and block_file_bytes (the files of one key) are summed over the ranks. SettingsError when the folder
    cannot be used. Too little free space for the quota only adds a line to `notes`.
    """
    assert rank_folders and all(Path(name).name == name for name in (layout, *rank_folders)), "plain names"
    capacity_keys = capacity_bytes // block_file_bytes
    if capacity_keys < 1:
        raise SettingsError(
            f"{FLAG} {root}: a quota of {capacity_bytes} bytes holds no KV block; one takes {block_file_bytes} bytes",
            FLAG,
        )
    try:
        lock = _take_lock(root, layout)
        tier: DiskTier | None = None
        try:
            folders = [lock.place / name for name in rank_folders]
            keys = _recover_keys(folders, block_file_bytes)
            excess = max(len(keys) - capacity_keys, 0)
            _remove(folders, keys[:excess])
            _probe(folders)
            tier = DiskTier(lock.place, capacity_keys, block_file_bytes, keys[excess:])
            tier.notes = _notes(root, capacity_bytes - tier.stats.bytes)
            tier._own(lock)
        finally:
            if tier is None:
                os.close(lock.descriptor)
    except OSError as error:
        raise SettingsError(
            f"{FLAG} {root} cannot be used: {error.strerror} ({error.filename or root})", FLAG
        ) from error
    return tier


def _take_lock(root: Path, layout: str) -> _Lock:
    """Locks the first free numbered folder. The kernel releases a lock when its process ends, in whatever way."""
    root.mkdir(parents=True, exist_ok=True)
    (root / layout).mkdir(mode=0o700, exist_ok=True)
    for number in range(MAX_GROUPS):
        place = root / layout / str(number)
        place.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(place / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _Lock(place, descriptor, _write_word(place / LOCK_NAME))
        except BlockingIOError:
            os.close(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
    raise SettingsError(f"{FLAG} {root}: {MAX_GROUPS} groups use this folder already", FLAG)


def _write_word(file: Path) -> bytes:
    word = secrets.token_hex(8)
    file.write_text(word)  # closed, so that other nodes of a network's file system read it
    return word.encode()


def _recover_keys(folders: Sequence[Path], block_file_bytes: int) -> list[bytes]:
    """Returns the keys whose files are complete in every folder, least recently used first. Removes all other blocks'
    files."""
    found: dict[bytes, tuple[int, int, float]] = {}  # files, their bytes, last use
    for folder in folders:
        folder.mkdir(mode=0o700, exist_ok=True)
        for key, size, used in list_blocks(folder):
            files, total, latest = found.get(key, (0, 0, 0.0))
            found[key] = (files + 1, total + size, max(latest, used))
    whole = {
        key: used for key, (files, total, used) in found.items() if files == len(folders) and total == block_file_bytes
    }
    _remove(folders, [key for key in found if key not in whole])
    return sorted(whole, key=lambda key: (whole[key], key))


def _remove(folders: Sequence[Path], keys: Iterable[bytes]) -> None:
    for key in keys:
        for folder in folders:
            remove_block(folder, key)


def _probe(folders: Sequence[Path]) -> None:
    """Raises OSError unless a file can be created, written and removed in each folder."""
    for folder in folders:
        probe = folder / _PROBE_NAME
        try:
            probe.write_bytes(bytes(_PROBE_BYTES))
        finally:
            probe.unlink(missing_ok=True)


def _notes(root: Path, wanted_bytes: int) -> list[str]:
    free_bytes = shutil.disk_usage(root).free
    if free_bytes >= wanted_bytes:
        return []
    return [
        f"{FLAG} {root}: {free_bytes / 2**30:.1f} GiB free, the quota may take {wanted_bytes / 2**30:.1f} GiB more; "
        "the disk tier is switched off when the disk is full"
    ]
