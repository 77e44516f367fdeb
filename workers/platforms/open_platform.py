"""The choice of a rank's platform, which imports the chosen one alone. Called by workers/rank/rank_server.py."""

import os
from typing import TYPE_CHECKING

import torch

from tandem.configs.errors import SettingsError
from tandem.configs.schema import Device, EngineSettings
from tandem.workers.platforms.base import Platform

if TYPE_CHECKING:
    from tandem.workers.platforms.core_share import CoreShare
    from tandem.workers.platforms.cpu import CpuPlatform


def open_platform(
    settings: EngineSettings, rank: int, ranks_on_node: int, gpu: str | None = None, cores: "CoreShare | None" = None
) -> Platform:
    """Return the platform of a rank, as asked; else CUDA when torch sees a device. The calling thread is activated and
    this process's torch threads are set.

    gpu: the one that the rank was given, as CUDA_VISIBLE_DEVICES names it; None: ranks of one node spread over its
    devices by their number. cores: of a rank process; given up by a rank on a GPU. SettingsError (--device) without
    the device asked for.
    """
    if settings.device.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("--device cuda, but torch sees no CUDA device here", "--device")
    if is_on_cpu(settings):
        return _cpu_platform(settings.model.batch_invariant).open(settings.device.cpu_threads, ranks_on_node, cores)
    from tandem.workers.platforms.cuda import CudaPlatform

    if cores is not None:
        cores.close()
    torch.set_num_threads(1)
    count = torch.cuda.device_count()
    return CudaPlatform.open(torch.device("cuda", rank % count if gpu is None else _place_of(gpu, count)))


def _place_of(gpu: str, count: int) -> int:
    """Return a GPU's number among the `count` that this process sees: one, unless Ray is told to hide none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [str(number) for number in range(count)] if visible is None else visible.replace(" ", "").split(",")
    if gpu not in seen[:count]:
        raise SettingsError(f"Ray gave a rank GPU {gpu}, and its process sees {', '.join(seen[:count])}", "--device")
    return seen.index(gpu)


def is_on_cpu(settings: EngineSettings) -> bool:
    """Return whether a rank of this machine computes on the CPU."""
    return settings.device.device == "cpu" or not torch.cuda.is_available()


def device_here(settings: EngineSettings) -> tuple[Device, int | None]:
    """Return the device that a rank of this machine computes on, and its memory if it has some of its own."""
    return ("cpu", None) if is_on_cpu(settings) else ("cuda", torch.cuda.get_device_properties(0).total_memory)


def _cpu_platform(batch_invariant: bool) -> "type[CpuPlatform]":
    if batch_invariant:
        from tandem.workers.platforms.cpu_invariant import InvariantCpuPlatform

        return InvariantCpuPlatform
    from tandem.workers.platforms.cpu import CpuPlatform

    return CpuPlatform
