"""How many KV blocks fit on this rank, and the words when too few do. Called by loading.py; torch-free.

CPU: --kv-cache-memory-bytes, or the lesser of what max_num_seqs full contexts need and 40 % of the available memory,
divided among the ranks of the node. CUDA: gpu_memory_utilization of the device less weights and the peak of a
profiling forward. --num-gpu-blocks-override beats all. Measures, never allocates.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from configs.errors import SettingsError
from configs.schema import CacheSettings

CPU_SHARE = 0.4
MIB = 2**20
GIB = 2**30
CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class KVNeeds:
    """What the engine could use: bytes of a block on this rank, tokens of one context, contexts at once."""

    block_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int

    @property
    def blocks_per_context(self) -> int:
        return -(-self.max_model_len // self.block_size)

    @property
    def most_blocks(self) -> int:
        return self.blocks_per_context * self.max_num_seqs


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Memory this process may still take: the system's, or less where a container sets a limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return max(0, min(available, int(limit) - int(used)))
    except (OSError, ValueError):  # no control group, or one without a limit: "max"
        return available


def machine_bytes(cgroup: Path = CGROUP) -> int:
    """Memory of the machine, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):
        return total


def check_offload(offload_gib: float, host_bytes: int, ranks_on_node: int) -> None:
    """Refuses --cpu-offload-gb when the machine has less memory, or has too little left. host_bytes: what one rank will
    keep there, 0 where that is not known yet."""
    flag, total, free = "--cpu-offload-gb", machine_bytes(), available_bytes()
    if offload_gib * GIB > total:
        raise SettingsError(f"{flag} {offload_gib:g} is more than the {total / GIB:.1f} GiB of this machine", flag)
    if host_bytes > free:
        raise SettingsError(
            f"{flag} {offload_gib:g} keeps {host_bytes / GIB:.1f} GiB in host memory, {free / GIB:.1f} GiB are free",
            flag,
        )
    if host_bytes * ranks_on_node > total:
        raise SettingsError(
            f"{flag} {offload_gib:g} keeps {host_bytes / GIB:.1f} GiB in host memory for each of {ranks_on_node} ranks"
            f" of a machine with {total / GIB:.1f} GiB",
            flag,
        )


def cpu_blocks(cache: CacheSettings, needs: KVNeeds, available_bytes: int, ranks_on_node: int) -> int:
    """Blocks for a CPU rank. available_bytes: what the node has left once the weights of its ranks are in memory.

    ranks_on_node: the ranks of every group that the node may hold, running or not, so that groups that start later
    (data parallelism, autoscaling) find their share.
    """
    if cache.num_blocks is not None:
        return _overridden(cache.num_blocks, needs, available_bytes // ranks_on_node)
    if cache.kv_cache_memory_bytes is not None:
        return _explicit(cache.kv_cache_memory_bytes, needs, available_bytes // ranks_on_node)
    share = int(CPU_SHARE * available_bytes) // ranks_on_node
    source = f"40 % of the {available_bytes // MIB} MiB available, over {ranks_on_node} rank(s), is"
    return min(_at_least_one_context(share, needs, source), needs.most_blocks)


def cuda_blocks(cache: CacheSettings, needs: KVNeeds, total_bytes: int, free_bytes: int, used_bytes: int) -> int:
    """Blocks for a CUDA rank. used_bytes: weights, the profiled peak of a step and what the context holds."""
    if cache.num_blocks is not None:
        return _overridden(cache.num_blocks, needs, free_bytes)
    if cache.kv_cache_memory_bytes is not None:
        return _explicit(cache.kv_cache_memory_bytes, needs, free_bytes)
    share = int(cache.gpu_memory_utilization * total_bytes) - used_bytes
    source = (
        f"--gpu-memory-utilization {cache.gpu_memory_utilization} of {total_bytes // MIB} MiB less "
        f"{used_bytes // MIB} MiB of weights and activations leaves"
    )
    return _at_least_one_context(share, needs, source)


def _overridden(num_blocks: int, needs: KVNeeds, free_bytes: int) -> int:
    """Any number that fits in memory: a request too long for it is refused by itself."""
    wanted = num_blocks * needs.block_bytes
    if wanted > free_bytes:
        raise SettingsError(
            f"--num-gpu-blocks-override {num_blocks} needs {_mib(wanted)} of KV cache on a rank, "
            f"{_mib(free_bytes)} are available",
            "--num-gpu-blocks-override",
        )
    return num_blocks


def _explicit(size_bytes: int, needs: KVNeeds, free_bytes: int) -> int:
    if size_bytes > free_bytes:
        raise SettingsError(
            f"--kv-cache-memory-bytes {size_bytes} is more than the {_mib(free_bytes)} available to a rank",
            "--kv-cache-memory-bytes",
        )
    return _at_least_one_context(size_bytes, needs, "--kv-cache-memory-bytes is", "--kv-cache-memory-bytes")


def _at_least_one_context(size_bytes: int, needs: KVNeeds, source: str, flag: str = "--max-model-len") -> int:
    """Blocks in size_bytes; refused when not even one full context fits."""
    blocks = max(0, size_bytes) // needs.block_bytes
    if blocks >= needs.blocks_per_context:
        return blocks
    wanted = needs.blocks_per_context * needs.block_bytes
    raise SettingsError(
        f"one context of --max-model-len {needs.max_model_len} needs {_mib(wanted)} of KV cache on a rank; {source} "
        f"{_mib(max(0, size_bytes))}: enough for --max-model-len {blocks * needs.block_size}",
        flag,
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"


def available_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
