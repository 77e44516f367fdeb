"""Chooses the layers of a rank that stream from host memory: by --cpu-offload-gb, and on CUDA by the device's memory.

Called by workers/rank/loading.py before weights are read. The arithmetic is in offload/weights/layer_placement.py and
planner.py. The choice is logged in one line.
"""

import logging

import torch

from tandem.configs.schema import EngineSettings
from tandem.offload.weights.layer_placement import LayerPlacement, bytes_to_save, place_layers
from tandem.parallel.context import ParallelContext
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.planning.budget import GIB, MIB, check_offload
from tandem.workers.planning.resolve import resolve_kv_dtype
from tandem.workers.planning.sizes import RankWeights, rank_weights

log = logging.getLogger(__name__)


def place_weights(
    settings: EngineSettings,
    spec: ArchSpec,
    context: ParallelContext,
    memory: tuple[int, int] | None,
    packs: bool,
    dtype: torch.dtype,
    max_model_len: int,
    ranks_on_node: int,
) -> LayerPlacement:
    """Places this rank's layers on the device or in host memory. memory: free and total bytes of a device with memory
    of its own, else None; packs: matrices of `dtype` are packed. SettingsError (--cpu-offload-gb) when the host has too
    little memory."""
    mesh = context.mesh
    weights = rank_weights(spec, mesh, dtype.itemsize, packs)
    asked_gib = settings.device.cpu_offload_gib
    save = int(asked_gib * GIB)
    if memory is not None:
        from tandem.workers.planning.planner import least_bytes

        name = str(dtype).removeprefix("torch.")
        kv_name = resolve_kv_dtype(settings, name)
        needed = weights.total_bytes + least_bytes(settings, spec, mesh, name, kv_name, max_model_len)
        save = bytes_to_save(needed, _device_budget(settings, *memory), save)
    placement = place_layers(weights.num_layers, weights.layer_bytes, save, weights.may_stream)
    check_offload(asked_gib, placement.host_bytes, ranks_on_node)
    if placement.streamed:
        as_asked = save == int(asked_gib * GIB) <= placement.saved_bytes
        level = logging.INFO if as_asked else logging.WARNING
        log.log(level, "rank %d: %s", context.rank, describe(placement, weights, asked_gib, save))
    return placement


def describe(placement: LayerPlacement, weights: RankWeights, asked_gib: float, save_bytes: int) -> str:
    """Describes the placement for the log. asked_gib: --cpu-offload-gb. save_bytes: weights to keep off the device,
    which is more than asked_gib when the device is too small."""
    asked = f"--cpu-offload-gb {asked_gib:.3g}: " if asked_gib else ""
    others = f"{placement.fixed} layers of another kind, " if placement.fixed else ""
    words = (
        f"{asked}{placement.num_resident - placement.fixed} layers resident "
        f"({_mib(placement.device_bytes - placement.buffer_bytes)}), "
        f"{len(placement.streamed)} streamed from host memory ({_mib(placement.host_bytes)}) through buffers of "
        f"{_mib(placement.buffer_bytes)}; {_mib(weights.fixed_bytes)} of {others}tables and norms stay on the device"
    )
    if save_bytes > int(asked_gib * GIB):
        words += f"; the device would lack {_mib(save_bytes)} with all weights on it"
    if placement.saved_bytes < save_bytes:
        words += f"; {_mib(save_bytes)} less was wanted, all layers streaming save {_mib(placement.saved_bytes)}"
    return words


def _device_budget(settings: EngineSettings, free_bytes: int, total_bytes: int) -> int:
    """Bytes of its device that this rank may still take under --gpu-memory-utilization."""
    return int(settings.cache.gpu_memory_utilization * total_bytes) - (total_bytes - free_bytes)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
