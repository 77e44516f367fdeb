"""Platforms of tests: one whose methods are replaced, and a GPU's on the host's memory."""

from copy import copy
from typing import TypeVar

import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.parallel.groups import GLOO
from tandem.workers.graphs.cuda_graphs import CaptureGraph
from tandem.workers.platforms.base import DeviceMemory, Platform
from tandem.workers.platforms.cuda import CudaPlatform

P = TypeVar("P", bound=Platform)


def replaced(platform: P, **members: object) -> P:
    """Return a copy of a platform with other methods or attributes."""
    made = copy(platform)
    vars(made).update(members)
    return made


class GpuOnHost(CudaPlatform):
    """The platform of ranks on a GPU, whose accelerator and memory are the host's; Triton, which needs a device, gives
    way to twins."""

    def __init__(self, accelerator: Accelerator, capture: CaptureGraph | None = None) -> None:
        super().__init__(torch.device("cpu"), accelerator, GLOO, capture)

    def has_triton(self) -> bool:
        return False

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(0, 0)
