"""Platforms of tests: one whose methods are replaced, and a GPU's on the host's memory, with twins of Triton's kernels
that a recorded graph holds."""

from collections.abc import Hashable
from copy import copy
from typing import TypeVar

import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.parallel.groups import GLOO
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.forward_batch import StepShape
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.graphs.cuda_graphs import CaptureGraph
from tandem.workers.graphs.graph_runner import Body, I, Outputs
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.sampling_ops import SamplingOps, TorchSampling
from tandem.workers.platforms.base import DeviceMemory, Platform
from tandem.workers.platforms.cuda import CudaPlatform

P = TypeVar("P", bound=Platform)


def replaced(platform: P, **members: object) -> P:
    """Return a copy of a platform with other methods or attributes."""
    made = copy(platform)
    vars(made).update(members)
    return made


class AnySteps(TorchAttention):
    """Captures steps with chunks too: their tokens attend one by one, each to all blocks that its row may have."""

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return super().replay_key(shape._replace(most_queries=1), kv, dtype)


class FixedTwin(TorchSampling):
    """Draws for any mix of rows by one sequence of calls."""

    choose_all = TorchSampling.choose


class GpuOnHost(CudaPlatform):
    """The platform of ranks on a GPU, whose accelerator and memory are the host's; Triton, which needs a device, gives
    way to twins."""

    def __init__(self, accelerator: Accelerator, capture: CaptureGraph | None = None) -> None:
        super().__init__(torch.device("cpu"), accelerator, GLOO, capture)

    def has_triton(self) -> bool:
        return False

    def attention(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
        if self.has_triton():
            return super().attention(dtype, head_dim, kv_dtype)
        return AnySteps(is_bounded=True, replays=True)

    def sampling_ops(self) -> SamplingOps:
        return super().sampling_ops() if self.has_triton() else FixedTwin()

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(0, 0)


class NoGraphs:
    """Runs every step eagerly."""

    can_replay = False
    num_replays = 0

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        return body(inputs)

    def begin_layer(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
