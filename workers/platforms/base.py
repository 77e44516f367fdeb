"""The Platform: one record of everything in which devices differ, made once per rank and passed down.

cpu.py and cuda.py make it; only they name a device. parallel/ and offload/ are handed the implementations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from tandem.configs.schema import Device
from tandem.offload.copies.accelerator import Accelerator
from tandem.offload.copies.kv_copies import BlockCopier
from tandem.offload.weights.weight_stream import Copier
from tandem.parallel.groups import Backend
from tandem.parallel.linear_methods import MakeMethod
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.graphs.graph_runner import GraphRunner
from tandem.workers.kernels.expert_ops import MakeExpertOps
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.lora_ops import LoraOps
from tandem.workers.kernels.sampling_ops import SamplingOps
from tandem.workers.platforms.device_rows import Columns, DeviceRows, Guess


class DeviceMemory(NamedTuple):
    """Bytes of a device: not in use by any process, and in all."""

    free_bytes: int
    total_bytes: int


class MakeAttention(Protocol):
    """Chooses the attention backend."""

    def __call__(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None, /) -> AttentionBackend:
        """kv_dtype: the cache's dtype, None for `dtype`."""
        ...


class MakeLatentAttention(Protocol):
    """Chooses the attention backend of latents."""

    def __call__(self, dtype: torch.dtype, width: int, kv_dtype: torch.dtype | None = None, /) -> LatentBackend:
        """width: elements of a latent and its key. kv_dtype: as in MakeAttention."""
        ...


class LinearMethods(Protocol):
    """Chooses the method of linear layers."""

    def __call__(self, dtype: torch.dtype, quantization: str | None = None, /) -> MakeMethod:
        """quantization: a key of FORMATS (parallel/quantization/weight_formats.py), None: dense. SettingsError where
        the platform has no such method."""
        ...


class ExpertOpsOf(Protocol):
    """Chooses what computes mixtures of experts."""

    def __call__(self, dtype: torch.dtype, quantization: str | None = None, /) -> MakeExpertOps:
        """quantization: as in LinearMethods."""
        ...


class MakeKVCopier(Protocol):
    """Makes the copier between the planes of a cache and a host slab [slots, slot bytes]."""

    def __call__(self, layers: Sequence[Sequence[torch.Tensor]], slab_SB: torch.Tensor, /) -> BlockCopier: ...


class MakeRows(Protocol):
    """Makes the device's view of a row table."""

    def __call__(self, columns: Columns, guess: Guess | None, /, *, keeps_tokens: bool = False) -> DeviceRows:
        """guess: what guesses drafts there, where the device is for that. keeps_tokens: DeviceRows.tokens is read."""
        ...


class MakeGraphs(Protocol):
    """Makes the runner of a stage's layers."""

    def __call__(self, before_run: Callable[[], None], can_replay: bool, /) -> GraphRunner:
        """before_run: is called before a step that is captured or replayed. can_replay: such steps are allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Platform:
    """One rank's device and the implementations for it.

    memory: measures a device that has memory of its own; None where device and host share memory. copies_beside: bytes
    move while the rank computes without taking from it. packs: whether dense matrices of a dtype are packed.
    scratch_blocks: KV blocks beside those of sequences, for padded tokens. weight_copier: takes the bytes of the
    streamed layers. zeros: zeroed memory of a shape. clear_blocks: zeroes blocks, which are in dim 1. copy_pages: host
    memory to device memory, for adapters. sampling_ops: from logits to tokens; the first call may compile.
    kernel_notes: lines for the user about kernels for a dtype that could not be had, as far as they have been asked
    for.
    """

    name: Device
    device: torch.device
    accelerator: Accelerator
    backend: Backend
    memory: Callable[[], DeviceMemory] | None
    copies_beside: bool
    packs: Callable[[torch.dtype], bool]
    linear_methods: LinearMethods
    attention: MakeAttention
    latent_attention: MakeLatentAttention
    expert_ops: ExpertOpsOf
    fused_ops: Callable[[torch.dtype], FusedOps]
    lora_ops: Callable[[torch.dtype], LoraOps]
    graphs: MakeGraphs
    scratch_blocks: int
    kv_copier: MakeKVCopier
    weight_copier: Callable[[int], Copier]
    rows: MakeRows
    zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    clear_blocks: Callable[[torch.Tensor, Sequence[int]], None]
    copy_pages: Callable[[torch.Tensor, torch.Tensor], None]
    sampling_ops: Callable[[], SamplingOps]
    kernel_notes: Callable[[torch.dtype, str | None], tuple[str, ...]]
