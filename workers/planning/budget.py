"""The number of KV blocks of a rank, from measured memory. Called by workers/rank/loading.py; torch-free.

CPU: --kv-cache-memory-bytes, or the KV of max_num_seqs contexts up to 40 % of the available memory, divided among the
ranks of the node. CUDA: gpu_memory_utilization of the device less weights and the peak of a profiling step.
--num-gpu-blocks-override replaces either.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from tandem.configs.errors import SettingsError
from tandem.configs.limits import CGROUP
from tandem.configs.schema import CacheSettings
from tandem.offload.kv.kv_groups import KVGroups

CPU_SHARE = 0.4
MIB = 2**20
GIB = 2**30
GATHER_BYTES: Final = 16 * MIB
"""Keys and values that attention gathers at once, where it gathers them."""
ATTENTION_BYTES: Final = 224 * MIB
"""The most that attention takes on a device with memory of its own, whatever the context: pieces.py, prompts/ there."""
MOST_PARTS: Final = 4096
"""Parts of a step's contexts, times queries, that attention computes beside each other where its kernels cut them."""


@dataclass(frozen=True, slots=True)
class KVNeeds:
    """The KV that the engine can use. block_bytes: of a block on this rank. block_size, max_model_len: tokens.
    max_num_seqs: contexts at the same time. groups: None: one, without a window."""

    block_bytes: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    groups: KVGroups | None = None

    @property
    def kv_groups(self) -> KVGroups:
        return KVGroups(self.block_size) if self.groups is None else self.groups

    @property
    def blocks_per_context(self) -> int:
        return self.kv_groups.needed(self.max_model_len)

    @property
    def most_blocks(self) -> int:
        return self.blocks_per_context * self.max_num_seqs


def available_bytes(cgroup: Path = CGROUP) -> int:
    """Memory that this process can still allocate, in bytes: the system's, or the container's where that is less."""
    available = int(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return max(0, min(available, int(limit) - int(used)))
    except (OSError, ValueError):  # no control group, or one without a limit: "max"
        return available


def machine_bytes(cgroup: Path = CGROUP) -> int:
    """Memory of the machine in bytes, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    try:
        return min(total, int((cgroup / "memory.max").read_text()))
    except (OSError, ValueError):
        return total


def check_offload(offload_gib: float, host_bytes: int, ranks_on_node: int) -> None:
    """Checks --cpu-offload-gb against the machine's memory, in all and still free. host_bytes: of one rank's streamed
    layers, 0 where it is not known yet. SettingsError."""
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
    """The number of KV blocks of a CPU rank. SettingsError when memory does not suffice for one context.

    available_bytes: of the node, with the weights of its ranks loaded. ranks_on_node: of all groups that the node may
    hold, also those that start later (data parallelism, autoscaling).
    """
    if cache.num_blocks is not None:
        return _overridden(cache.num_blocks, needs, available_bytes // ranks_on_node)
    if cache.kv_cache_memory_bytes is not None:
        return _explicit(cache.kv_cache_memory_bytes, needs, available_bytes // ranks_on_node)
    share = int(CPU_SHARE * available_bytes) // ranks_on_node
    source = f"40 % of the {available_bytes // MIB} MiB available, over {ranks_on_node} rank(s), is"
    return min(_at_least_one_context(share, needs, source), needs.most_blocks)


def cuda_blocks(cache: CacheSettings, needs: KVNeeds, total_bytes: int, free_bytes: int, used_bytes: int) -> int:
    """The number of KV blocks of a CUDA rank. used_bytes: weights, the profiled peak of a step and the CUDA context.
    SettingsError when memory does not suffice for one context."""
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
    """Checks --num-gpu-blocks-override against memory, and that a token fits; a request too long for the pool is
    refused later."""
    if num_blocks < needs.kv_groups.count:
        raise SettingsError(
            f"{num_blocks} hold no token: each of the model's {needs.kv_groups.count} groups of layers has its own",
            "--num-gpu-blocks-override",
        )
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
    """The number of blocks in size_bytes. SettingsError when a context does not fit. source: words before the size."""
    blocks = max(0, size_bytes) // needs.block_bytes
    if blocks >= needs.blocks_per_context:
        return blocks
    wanted = needs.blocks_per_context * needs.block_bytes
    raise SettingsError(
        f"one context of --max-model-len {needs.max_model_len} needs {_mib(wanted)} of KV cache on a rank; {source} "
        f"{_mib(max(0, size_bytes))}: enough for --max-model-len {needs.kv_groups.longest(blocks)}",
        flag,
    )


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"
