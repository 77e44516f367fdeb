"""The tiers below the device of one group, opened when its ranks have loaded: how many slots, whose memory.

Called by workers/rank_group.py and workers/inprocess_executor.py; torch-free. What cannot be had is a note in plain
words, never the end of the group: it serves on with the tiers that are left, or with none.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from configs.schema import EngineSettings
from offload.eviction import make_policy
from offload.host_tier import HostTier
from offload.tiered_store import TieredStore
from workers.messages import RankLoaded, RankTiers
from workers.resolve import fingerprint

GIB = 2**30
LAYOUT_VERSION = "1"


@dataclass(frozen=True)
class OpenTiers:
    """For every rank what it is told, for the engine the bookkeeping; notes say what was chosen or why not."""

    ranks: list[RankTiers]
    store: TieredStore
    notes: tuple[str, ...]
    close: Callable[[], None]


@dataclass(frozen=True)
class NoTiersBecause:
    """Only the device. `notes` is empty when nothing below it was asked for."""

    notes: tuple[str, ...] = ()


def open_tiers(
    settings: EngineSettings, loaded: Sequence[RankLoaded], available_bytes: int
) -> OpenTiers | NoTiersBecause:
    """The tiers that the settings ask for. available_bytes: memory of this machine beside weights and device KV."""
    cache = settings.cache
    if cache.kv_offloading_gib is None:
        return NoTiersBecause()
    size_bytes = int(cache.kv_offloading_gib * GIB)
    block_bytes = sum(rank.block_bytes for rank in loaded)
    num_slots = size_bytes // block_bytes
    if size_bytes > available_bytes:
        return _none(f"{cache.kv_offloading_gib:g} GiB is more than the {available_bytes / GIB:.1f} GiB available")
    if num_slots < 1:
        return _none(f"{cache.kv_offloading_gib:g} GiB holds no block of {block_bytes} bytes")
    layout = layout_digest(settings, loaded)
    ranks = [RankTiers(num_slots=num_slots, layout=layout) for _ in loaded]
    store = TieredStore(HostTier(num_slots, make_policy(cache.kv_eviction)))
    tokens = num_slots * cache.block_size
    note = f"host tier: {num_slots} KV blocks ({tokens} tokens, {size_bytes / GIB:.1f} GiB), {cache.kv_eviction}"
    return OpenTiers(ranks, store, (note,), lambda: None)


def layout_digest(settings: EngineSettings, loaded: Sequence[RankLoaded]) -> bytes:
    """16 bytes that are equal exactly when KV bytes of one run can be read by another: same weights, same cut."""
    cut = (
        settings.parallel.tensor_parallel_size,
        settings.parallel.pipeline_parallel_size,
        settings.cache.block_size,
        [(rank.block_bytes, rank.dtype) for rank in loaded],
    )
    weights = fingerprint(Path(settings.model.model), settings)
    data = msgspec.msgpack.encode((LAYOUT_VERSION, weights, cut))
    return hashlib.blake2b(data, digest_size=16).digest()


def _none(reason: str) -> NoTiersBecause:
    return NoTiersBecause((f"--kv-offloading-size: {reason}; serving without tiers below the device",))
