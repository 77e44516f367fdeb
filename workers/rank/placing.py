"""Which of a rank's layers stream from host memory: from --cpu-offload-gb, and on CUDA from what the device can hold.

Called by loading.py before weights are read; the arithmetic is offload/placement.py's and workers/planning.py's.
Says in one line what was chosen and why; refuses what host memory cannot take.
"""

import logging

import torch

from configs.schema import EngineSettings
from offload.placement import LayerPlacement, bytes_to_save, place_layers
from parallel.context import ParallelContext
from parallel.matmul import can_pack
from workers.models.sizes import RankWeights, rank_weights
from workers.models.spec import ArchSpec
from workers.planning import least_bytes
from workers.rank.memory import GIB, MIB, check_offload
from workers.resolve import resolve_kv_dtype

log = logging.getLogger(__name__)


def place_weights(
    settings: EngineSettings,
    spec: ArchSpec,
    context: ParallelContext,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    ranks_on_node: int,
) -> LayerPlacement:
    """The placement of this rank's layers. SettingsError (--cpu-offload-gb) when the host has too little memory."""
    mesh = context.mesh
    packs = device.type == "cpu" and can_pack(dtype)
    weights = rank_weights(spec, mesh, dtype.itemsize, packs)
    asked_gib = settings.device.cpu_offload_gib
    save = int(asked_gib * GIB)
    if device.type == "cuda":
        name = str(dtype).removeprefix("torch.")
        kv_name = resolve_kv_dtype(settings, name)
        needed = weights.total_bytes + least_bytes(settings, spec, mesh, name, kv_name, max_model_len)
        save = bytes_to_save(needed, _device_budget(settings, device), save)
    placement = place_layers(weights.num_layers, weights.layer_bytes, save)
    check_offload(asked_gib, placement.host_bytes, ranks_on_node)
    if placement.streamed:
        as_asked = save == int(asked_gib * GIB) <= placement.saved_bytes
        level = logging.INFO if as_asked else logging.WARNING
        log.log(level, "rank %d: %s", context.rank, describe(placement, weights, asked_gib, save))
    return placement


def describe(placement: LayerPlacement, weights: RankWeights, asked_gib: float, save_bytes: int) -> str:
    """The placement in words, and what of the request cannot be had."""
    asked = f"--cpu-offload-gb {asked_gib:.3g}: " if asked_gib else ""
    words = (
        f"{asked}{placement.num_resident} layers resident ({_mib(placement.num_resident * placement.layer_bytes)}), "
        f"{len(placement.streamed)} streamed from host memory ({_mib(placement.host_bytes)}) through buffers of "
        f"{_mib(placement.buffer_bytes)}; {_mib(weights.fixed_bytes)} of tables and norms stay on the device"
    )
    if save_bytes > int(asked_gib * GIB):
        words += f"; the device would lack {_mib(save_bytes)} with all weights on it"
    if placement.saved_bytes < save_bytes:
        words += f"; {_mib(save_bytes)} less was wanted, all layers streaming save {_mib(placement.saved_bytes)}"
    return words


def _device_budget(settings: EngineSettings, device: torch.device) -> int:
    """What this rank may take of its CUDA device, beside what is taken already."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return int(settings.cache.gpu_memory_utilization * total_bytes) - (total_bytes - free_bytes)


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"
