"""The tiers below the device of one group, opened when its ranks have loaded: how many slots, whose memory.

Called by workers/executor/rank_group.py; torch-free. What cannot be had is a
note in plain words, never the end of the group: it serves on with the tiers that are left, or with none.
"""

import hashlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tandem.configs.errors import SettingsError
from tandem.configs.schema import CacheSettings, EngineSettings
from tandem.offload.host.host_process import HostTierError, lease_soon
from tandem.offload.kv.disk_io import file_bytes
from tandem.offload.kv.disk_tier import DiskTier, open_disk_tier
from tandem.offload.kv.eviction import make_policy
from tandem.offload.kv.host_tier import HostTier
from tandem.offload.kv.slot_index import SlotIndex, index_bytes
from tandem.offload.kv.tiered_store import TieredStore
from tandem.workers.messages.handshake import RankLoaded, RankTiers
from tandem.workers.planning.model_source import engine_here
from tandem.workers.planning.resolve import fingerprint

log = logging.getLogger(__name__)
GIB = 2**30
LAYOUT_VERSION = "1"
STAMP_BYTES = 16


@dataclass(frozen=True)
class OpenTiers:
    """Tiers below the device: settings for each rank. build(has_earlier): the bookkeeping for the engine, and notes for
    the log, once all ranks have opened them; called once. has_earlier: of all ranks (RankReady)."""

    ranks: list[RankTiers]
    build: Callable[[bool], tuple[TieredStore, tuple[str, ...]]]
    close: Callable[[], None]


def no_tiers(reason: str) -> str:
    """Returns and logs why tiers that were asked for cannot be opened."""
    note = f"--kv-offloading-size: {reason}; serving without tiers below the device"
    log.warning("%s", note)
    return note


def open_tiers(
    settings: EngineSettings,
    loaded: Sequence[RankLoaded],
    free: Sequence[int],
    hosts: Sequence[str] = (),
    sockets: Mapping[str, str] | None = None,
) -> OpenTiers | str:
    """Returns the tiers that the settings ask for, or a note of why they cannot be had. free: bytes of its machine that
    each rank may take, beside weights and device KV.

    hosts: the machine of each rank; the coordinator is on rank 0's. sockets: by machine, the host-tier process there,
    whose memory outlives this group; None: ranks hold it themselves.
    """
    cache = settings.cache
    num_slots = _slots(cache, loaded, None if sockets is not None else free)
    if isinstance(num_slots, str):
        return no_tiers(num_slots)
    layout = layout_digest(settings, loaded)
    region: _Region | None = None
    if sockets is not None:
        near = [rank for rank, host in zip(loaded, hosts, strict=True) if host == hosts[0]]
        try:
            region = _Region(Path(sockets[hosts[0]]), layout, num_slots, near, is_whole=len(near) == len(loaded))
        except HostTierError as error:
            return no_tiers(str(error))
    num_groups = loaded[0].num_kv_groups
    tokens = f"{'at least ' if num_groups > 1 else ''}{num_slots // num_groups * cache.block_size} tokens"
    notes = [f"host tier: {num_slots} KV blocks ({tokens}, {cache.kv_offloading_gib:g} GiB), {cache.kv_eviction}"]
    disk = _open_disk(cache, layout, loaded, notes)
    ranks = [
        RankTiers(
            num_slots=num_slots,
            layout=layout,
            host_socket=None if sockets is None else sockets[hosts[place]],
            disk_folder=None if disk is None else str(disk.folder(rank_folder(rank.rank))),
            disk_word=b"" if disk is None else disk.word,
            **({} if region is None else region.of_rank(rank.rank)),
        )
        for place, rank in enumerate(loaded)
    ]

    def build(has_earlier: bool) -> tuple[TieredStore, tuple[str, ...]]:
        index, found = (None, []) if region is None else region.take_up(has_earlier)
        if found:
            notes.append(f"host tier: {len(found)} KV blocks of an earlier group are there")
        return TieredStore(HostTier(num_slots, make_policy(cache.kv_eviction), index, found), disk), tuple(notes)

    def close() -> None:
        if disk is not None:
            disk.close()
        if region is not None:
            region.close()

    return OpenTiers(ranks, build, close)


def _slots(cache: CacheSettings, loaded: Sequence[RankLoaded], free: Sequence[int] | None) -> int | str:
    """Returns the blocks that host memory has room for, or why there are none. free: None where others hold it."""
    assert cache.kv_offloading_gib is not None, "no tiers are asked for"
    block_bytes = sum(rank.block_bytes for rank in loaded)
    num_slots = int(cache.kv_offloading_gib * GIB) // block_bytes
    if num_slots < 1:
        return f"{cache.kv_offloading_gib:g} GiB holds no block of {block_bytes} bytes"
    if free is None:
        return num_slots
    most_slots = min(there // rank.block_bytes for rank, there in zip(loaded, free, strict=True))
    if num_slots > most_slots:
        most = most_slots * block_bytes / GIB
        return f"{cache.kv_offloading_gib:g} GiB is more than the {most:.1f} GiB that its machines have free"
    return num_slots


class _Region:
    """The coordinator's lease of host memory on its node, with the index of all slots and the slabs of the ranks there,
    `near`. Unless it is_whole, others lease theirs on their nodes: then what an earlier group left is of use only if
    all of them bear the stamp of its index."""

    def __init__(
        self, socket: Path, layout: bytes, num_slots: int, near: Sequence[RankLoaded], *, is_whole: bool
    ) -> None:
        slots_bytes = index_bytes(num_slots)
        self._slabs = {rank.rank: place for place, rank in enumerate(near)}
        sizes = [num_slots * rank.block_bytes for rank in near]
        self._held = lease_soon(socket, layout.hex(), slots_bytes + (0 if is_whole else STAMP_BYTES), sizes)
        self._stamp = slice(slots_bytes, slots_bytes + STAMP_BYTES)
        self._stamps = None if is_whole else (bytes(self._held.index[self._stamp]), secrets.token_bytes(STAMP_BYTES))
        self._index = SlotIndex(self._held.index, num_slots)

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Returns the fields of RankTiers that say which slab is the rank's."""
        if (slab := self._slabs.get(rank)) is None:
            return {"stamps": self._stamps}
        return {"host_token": self._held.token, "host_slab": slab}

    def take_up(self, has_earlier: bool) -> tuple[SlotIndex, list[tuple[int, bytes]]]:
        """Returns the index and what is in it, of an earlier group; nothing where a slab is not the one that it is
        about."""
        found = self._index.items()
        if not has_earlier:
            for slot, _ in found:
                self._index.clear(slot)
        if self._stamps is not None:
            self._held.index[self._stamp] = self._stamps[1]
        return self._index, found if has_earlier else []

    def close(self) -> None:
        self._held.close()


def free_bytes(loaded: Sequence[RankLoaded], hosts: Sequence[str], num_blocks: int) -> list[int]:
    """Return the bytes of its machine's memory that each rank may take for tiers: equal parts among the ranks of a
    machine, of what is free there beside the KV that will be. hosts: the machine of each rank."""
    ranks, free = Counter(hosts), dict[str, int]()
    for rank, host in zip(loaded, hosts, strict=True):
        free[host] = min(free.get(host, rank.free_host_bytes), rank.free_host_bytes)  # the last one knows of all
    for rank, host in zip(loaded, hosts, strict=True):
        free[host] -= device_bytes(rank, num_blocks) if rank.is_in_host_memory else 0
    return [max(0, free[host]) // ranks[host] for host in hosts]


def device_bytes(rank: RankLoaded, num_blocks: int) -> int:
    """Return the bytes that a rank's KV and adapters take of its device."""
    return num_blocks * rank.block_bytes + rank.adapter_pages * rank.adapter_page_bytes


def rank_folder(rank: int) -> str:
    """Return the place of a rank's files below the group's folder."""
    return f"rank{rank}"


def _open_disk(cache: CacheSettings, layout: bytes, loaded: Sequence[RankLoaded], notes: list[str]) -> DiskTier | None:
    """The tier below the host, None when it is not asked for or cannot be had; adds to the notes."""
    if cache.kv_disk_path is None or cache.kv_disk_gib is None:
        return None
    folders = [rank_folder(rank.rank) for rank in loaded]
    file_size = sum(file_bytes(rank.block_bytes) for rank in loaded)
    try:
        disk = open_disk_tier(Path(cache.kv_disk_path), layout.hex(), folders, int(cache.kv_disk_gib * GIB), file_size)
    except SettingsError as error:
        notes.append(f"{error}; serving without the disk tier")
        log.warning("%s", notes[-1])
        return None
    stats = disk.stats
    notes += disk.notes
    notes.append(f"disk tier: room for {stats.capacity_keys} KV blocks in {disk.place}, {stats.keys} found there")
    return disk


def layout_digest(settings: EngineSettings, loaded: Sequence[RankLoaded]) -> bytes:
    """16 bytes that are equal only when KV bytes of one run can be read by another: the same files, sharding,
    planes and block size."""
    sharding = (
        settings.parallel.tensor_parallel_size,
        settings.parallel.pipeline_parallel_size,
        settings.cache.block_size,
        [(rank.block_bytes, rank.dtype, rank.kv_dtype, rank.kv_layout) for rank in loaded],
    )
    settings = engine_here(settings)
    folder = Path(settings.model.model)
    changed = [file.stat().st_mtime_ns for file in sorted(folder.glob("*.safetensors"))]
    data = msgspec.msgpack.encode((LAYOUT_VERSION, fingerprint(folder, settings), changed, sharding))
    return hashlib.blake2b(data, digest_size=16).digest()
