"""Platform: everything in which devices differ, as one class per device and one object per rank.

cpu.py and cuda.py implement it; only they name a device. parallel/ and offload/ are handed what its methods return.
What holds for a device on every machine stands in configs/platform_facts.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from tandem.configs.platform_facts import PLATFORM_FACTS, PlatformFacts
from tandem.configs.schema import Device
from tandem.offload.copies.accelerator import Accelerator
from tandem.offload.weights.weight_stream import Copier
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.parallel.groups import Backend
from tandem.parallel.linear_methods import LinearMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.parallel.quantization.weight_plan import WeightPlan
from tandem.parallel.stored.read_ahead import Bounds
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.latents.latent_backend import LatentBackend
from tandem.workers.graphs.graph_runner import GraphRunner
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.lora_ops import LoraOps
from tandem.workers.kernels.sampling_ops import SamplingOps
from tandem.workers.kernels.triton.tiles import TunedTiles
from tandem.workers.models.spec.arch import Mla
from tandem.workers.platforms.device_rows import Columns, DeviceRows, Guess

if TYPE_CHECKING:  # of features that a model or a start may be without
    from tandem.offload.copies.kv_copies import BlockCopier
    from tandem.workers.kernels.expert_ops import ExpertOps
    from tandem.workers.tuning.tuned_start import Tuner

HEAD_DIM = 128
"""The head that implementations() asks for: most models have it."""


class DeviceMemory(NamedTuple):
    """Bytes of a device: not in use by any process, and in all."""

    free_bytes: int
    total_bytes: int


class Platform(ABC):
    """One rank's device and the implementations for it. A method that chooses may compile when it is first called."""

    name: Device
    device: torch.device
    accelerator: Accelerator
    backend: Backend
    """The backend of collectives between ranks."""
    copies_beside: bool
    """Bytes move while the rank computes without taking from it."""
    scratch_blocks: int = 0
    """KV blocks beside those of sequences, for padded tokens."""
    read_ahead = Bounds()
    """Bounds of what is read of a checkpoint ahead of what is converted, packed or copied to the device."""

    has_core: bool = False
    """Ranks of the machine have a core each, and may spin while they wait for each other."""
    tunes: bool = False
    """Ranks on the device find the tiles of their kernels by measuring, which they do together."""
    tiles = TunedTiles()
    """Tiles that kernels are launched with; set before attention() and experts() are asked."""

    @property
    def facts(self) -> PlatformFacts:
        return PLATFORM_FACTS[self.name]

    def begin_step(self) -> None:  # noqa: B027
        """Called before each step, on its thread."""

    def ready(self) -> None:  # noqa: B027
        """Called when a rank's start is over: kernels are compiled, and steps captured."""

    # ---- what layers compute with ----

    @abstractmethod
    def attention(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
        """Return the attention backend. kv_dtype: the cache's dtype, None for `dtype`."""

    @abstractmethod
    def latent_attention(self, dtype: torch.dtype, spec: Mla, kv_dtype: torch.dtype | None = None) -> LatentBackend:
        """Return the backend of latents. spec: of its layers. kv_dtype: as in attention()."""

    @abstractmethod
    def linear(
        self,
        weights: Sequence[Param],
        context: ParallelContext,
        /,
        place: Place = as_given,
        *,
        dtype: torch.dtype,
    ) -> LinearMethod:
        """Return the method of one linear layer. weights: those that it merges, which say by their schemes how they are
        held."""

    def settle(self) -> tuple[str, ...]:
        """Choose what depends on measurements, once all weights that linear() was asked for are in memory; return a
        line on each choice."""
        return ()

    @abstractmethod
    def packs(self, dtype: torch.dtype) -> bool:
        """Return whether linear() holds dense matrices of a dtype in a packed form."""

    @abstractmethod
    def experts(self, dtype: torch.dtype, place: Place = as_given) -> "ExpertOps":
        """Return what computes one layer's mixture of experts. place: where its weights go."""

    @abstractmethod
    def fused_ops(self, dtype: torch.dtype) -> FusedOps: ...

    @abstractmethod
    def lora_ops(self, dtype: torch.dtype) -> LoraOps: ...

    @abstractmethod
    def sampling_ops(self) -> SamplingOps:
        """Return what leads from logits to tokens."""

    @abstractmethod
    def graphs(self, before_run: Callable[[], None], can_replay: bool, tp: StepCollectives) -> GraphRunner:
        """Return the runner of a stage's layers. before_run: is called before a step that is captured or replayed.
        can_replay: such steps are allowed. tp: what the layers sum with."""

    def tuner(self) -> "Tuner | None":
        """Return what measures them; None where this machine lacks the kernels."""
        return None

    # ---- memory and copies ----

    @abstractmethod
    def memory(self) -> DeviceMemory | None:
        """Measure a device that has memory of its own; None where device and host share memory."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed memory of the device."""

    @abstractmethod
    def clear_blocks(self, memory: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Zero blocks, which are in dim 1."""

    @abstractmethod
    def copy_pages(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy host memory to device memory, for adapters."""

    @abstractmethod
    def rows(self, columns: Columns, guess: Guess | None, *, keeps_tokens: bool = False) -> DeviceRows:
        """Return the device's view of a row table. guess: what guesses drafts there, where the device is for that.
        keeps_tokens: DeviceRows.tokens is read."""

    @abstractmethod
    def kv_copier(self, layers: Sequence[Sequence[torch.Tensor]], slab_SB: torch.Tensor) -> "BlockCopier":
        """Return the copier between the planes of a cache and a host slab [slots, slot bytes]."""

    @abstractmethod
    def weight_copier(self, host_bytes: int) -> Copier:
        """Return what brings streamed layers, of so many bytes, to the device."""

    # ---- words ----

    @abstractmethod
    def implementations(self, dtype: torch.dtype) -> dict[str, str]:
        """Return the names of what a rank without flags computes with, by subject: keys of facts.implementations."""

    @abstractmethod
    def obstacle(self, dtype: torch.dtype) -> str | None:
        """Return why this machine compiles no kernels for a dtype, if it should and does not."""

    def kernel_notes(self, dtype: torch.dtype, plan: WeightPlan) -> tuple[str, ...]:
        """Return lines for the user about kernels that could not be had, as far as they have been asked for. plan:
        of the weights."""
        return ()
