"""All that a rank has for adapters: the slab, the sites in its decoder, the movers. Made by workers/rank/loading.py.

Sizes the slab: --lora-memory-bytes, or room for max_loras adapters of max_lora_rank on every linear layer of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.environment import cache_folder
from configs.errors import SettingsError
from configs.schema import LoraSettings
from workers.channel import MoverKind
from workers.kernels.lora import select_lora_ops
from workers.lora.layout import ShardShape
from workers.lora.movers import HostCopies, PlaceMover, ShardReader, SourceMover
from workers.lora.sites import AdapterSites
from workers.lora.slab import AdapterSlab
from workers.models.decoder import Decoder
from workers.models.spec import ArchSpec
from workers.rank.kv_mover import MoverThread
from workers.rank.mover_inbox import Inbox

FLAG = "--lora-memory-bytes"
MIB = 2**20


@dataclass(frozen=True, slots=True)
class RankAdapters:
    """Adapters of one rank, ready to be moved and used."""

    slab: AdapterSlab
    spec: ArchSpec
    device: torch.device
    dtype: torch.dtype

    @property
    def num_pages(self) -> int:
        return int(self.slab.slab_PE.shape[0])

    @property
    def nbytes(self) -> int:
        return int(self.slab.slab_PE.nbytes)

    def movers(self, rank: int, inbox: Callable[[MoverKind], Inbox]) -> list[MoverThread]:
        """Ready to start."""
        copies: HostCopies = {}
        pin = self.device.type == "cuda"
        read = ShardReader(self.spec, self.slab, cache_folder() / "adapters", self.dtype, pin=pin)
        return [
            MoverThread(rank, SourceMover(read, copies), inbox("source")),
            MoverThread(rank, PlaceMover(self.slab, copies, self.device), inbox("adapter")),
        ]


def open_adapters(
    settings: LoraSettings,
    spec: ArchSpec,
    decoder: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    available_bytes: int | None,
) -> RankAdapters:
    """Allocates the slab and attaches the sites. available_bytes: of host memory for this rank, None on CUDA.

    SettingsError (--lora-memory-bytes) when there is too little memory, or too little was asked for.
    """
    linears = list(decoder.linears())
    shape = ShardShape.of([part for linear in linears for part in linear.parts], settings.max_lora_rank)
    num_pages = _count_pages(settings, shape, dtype)
    size = num_pages * shape.page_elements * dtype.itemsize
    if available_bytes is not None and size > available_bytes:
        raise _too_large(size, f"{available_bytes / MIB:.1f} MiB are available to a rank")
    try:
        slab = AdapterSlab(shape, num_pages, settings.max_loras, dtype, device)
    except torch.OutOfMemoryError as error:
        raise _too_large(size, str(error)) from error
    sites = AdapterSites(slab, select_lora_ops(device, dtype))
    sites.attach(linears)
    sites.warm_up()
    decoder.adapt(sites)
    return RankAdapters(slab, spec, device, dtype)


def _count_pages(settings: LoraSettings, shape: ShardShape, dtype: torch.dtype) -> int:
    page_bytes = shape.page_elements * dtype.itemsize
    if settings.memory_bytes is None:
        return settings.max_loras * shape.most_pages
    if settings.memory_bytes < page_bytes:
        raise SettingsError(f"{FLAG} {settings.memory_bytes} is less than one page of {page_bytes} bytes", FLAG)
    return settings.memory_bytes // page_bytes


def _too_large(size: int, why: str) -> SettingsError:
    return SettingsError(f"{size / MIB:.1f} MiB for adapters do not fit on a rank: {why}", FLAG)
