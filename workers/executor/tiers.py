"""The tiers below the device of one group, opened when its ranks have loaded: how many slots, whose memory.

Called by workers/executor/rank_group.py; torch-free. What cannot be had is a
note in plain words, never the end of the group: it serves on with the tiers that are left, or with none.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.configs.errors import SettingsError
from tandem.configs.schema import CacheSettings, EngineSettings
from tandem.offload.host.host_process import HostTierError, RegionLease, lease
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
LEASE_S = 10.0
LEASE_RETRY_S = 5.0
RESERVE_S_PER_GIB = 4.0


@dataclass(frozen=True)
class OpenTiers:
    """Tiers below the device: settings for each rank, bookkeeping for the engine, and notes for the log."""

    ranks: list[RankTiers]
    store: TieredStore
    notes: tuple[str, ...]
    close: Callable[[], None]


def no_tiers(reason: str) -> str:
    """Returns and logs why tiers that were asked for cannot be opened."""
    note = f"--kv-offloading-size: {reason}; serving without tiers below the device"
    log.warning("%s", note)
    return note


def open_tiers(
    settings: EngineSettings, loaded: Sequence[RankLoaded], free: Sequence[int], host_socket: str | None = None
) -> OpenTiers | str:
    """Returns the tiers that the settings ask for, or a note of why they cannot be had. free: bytes of its machine that
    each rank may take, beside weights and device KV.

    host_socket: the node's host-tier process, whose memory outlives this group; None: ranks hold it themselves.
    """
    cache = settings.cache
    assert cache.kv_offloading_gib is not None, "no tiers are asked for"
    size_bytes = int(cache.kv_offloading_gib * GIB)
    block_bytes = sum(rank.block_bytes for rank in loaded)
    num_slots = size_bytes // block_bytes
    if num_slots < 1:
        return no_tiers(f"{cache.kv_offloading_gib:g} GiB holds no block of {block_bytes} bytes")
    most_slots = min(there // rank.block_bytes for rank, there in zip(loaded, free, strict=True))
    if host_socket is None and num_slots > most_slots:
        most = most_slots * block_bytes / GIB
        return no_tiers(f"{cache.kv_offloading_gib:g} GiB is more than the {most:.1f} GiB that its machines have free")
    layout = layout_digest(settings, loaded)
    held: RegionLease | None = None
    index, found = None, []
    if host_socket is not None:
        try:
            held = _lease(Path(host_socket), layout, num_slots, [rank.block_bytes for rank in loaded])
        except HostTierError as error:
            return no_tiers(str(error))
        index = SlotIndex(held.index, num_slots)
        found = index.items()
    num_groups = loaded[0].num_kv_groups
    tokens = f"{'at least ' if num_groups > 1 else ''}{num_slots // num_groups * cache.block_size} tokens"
    notes = [f"host tier: {num_slots} KV blocks ({tokens}, {size_bytes / GIB:g} GiB), {cache.kv_eviction}"]
    disk = _open_disk(cache, layout, loaded, notes)
    if found:
        notes.append(f"host tier: {len(found)} KV blocks of an earlier group are there")
    ranks = [
        RankTiers(
            num_slots=num_slots,
            layout=layout,
            host_socket=host_socket,
            host_token=None if held is None else held.token,
            disk_folder=None if disk is None else str(disk.folder(rank_folder(rank.rank))),
        )
        for rank in loaded
    ]
    store = TieredStore(HostTier(num_slots, make_policy(cache.kv_eviction), index, found), disk)

    def close() -> None:
        if disk is not None:
            disk.close()
        if held is not None:
            held.close()

    return OpenTiers(ranks, store, tuple(notes), close)


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


def _lease(socket: Path, layout: bytes, num_slots: int, block_bytes: list[int]) -> RegionLease:
    """A region of the host-tier process. A group that this one replaces may still hold the only one for a moment."""
    sizes = [num_slots * size for size in block_bytes]
    timeout_s = LEASE_S + sum(sizes) / GIB * RESERVE_S_PER_GIB
    deadline_s = time.monotonic() + LEASE_RETRY_S
    while True:
        try:
            return lease(socket, layout.hex(), index_bytes(num_slots), sizes, timeout_s)
        except HostTierError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


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
