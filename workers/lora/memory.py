"""All that a rank has for adapters: the slab, the sites in its decoder, the movers. Made by workers/rank/loading.py.

Sizes the slab: --lora-memory-bytes, or room for max_loras adapters of max_lora_rank on every linear layer of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.environment import cache_folder
from configs.errors import SettingsError
from configs.schema import LoraSettings
from workers.channel import REMOTES, MoverKind
from workers.kernels.lora import select_lora_ops
from workers.lora.layout import ShardShape, in_pieces
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
    model_folder: Path | None
    device: torch.device
    dtype: torch.dtype

    @property
    def num_pages(self) -> int:
        return int(self.slab.slab_PE.shape[0])

    @property
    def nbytes(self) -> int:
        return int(self.slab.memory_PE.nbytes)

    def movers(self, rank: int, inbox: Callable[[MoverKind], Inbox]) -> list[MoverThread]:
        """Ready to start."""
        copies: HostCopies = {}
        pin = self.device.type == "cuda"
        read = ShardReader(self.spec, self.model_folder, self.slab, cache_folder() / "adapters", self.dtype, pin=pin)
        place = PlaceMover(self.slab, copies, self.device)
        sources: list[MoverKind] = ["folder", *REMOTES]
        return [
            MoverThread(rank, place, inbox("adapter")),
            *(MoverThread(rank, SourceMover(read, copies), inbox(kind)) for kind in sources),
        ]


def open_adapters(
    settings: LoraSettings,
    spec: ArchSpec,
    model_folder: Path | None,
    decoder: Decoder,
    device: torch.device,
    dtype: torch.dtype,
    *,
    available_bytes: int | None,
    pp_size: int,
) -> RankAdapters:
    """Allocates the slab and attaches the sites. model_folder: the checkpoint, None where the weights are random;
    available_bytes: of host memory for this rank, None on CUDA.

    Ranks of every stage get as many pages as the stage with the most layers needs: the group has the least of them.
    SettingsError (--lora-memory-bytes) when there is too little memory, or too little was asked for.
    """
    linears = list(decoder.linears())
    parts = [part for linear in linears for part in linear.parts]
    most_layers = -(-spec.num_layers // pp_size)
    of_a_layer = parts[: len(parts) // decoder.num_local_layers]
    fullest = ShardShape.of(of_a_layer * most_layers, settings.max_lora_rank)
    num_pages = _count_pages(settings, fullest, dtype)
    embedding, head = (
        [] if table is None else in_pieces(table.part, fullest.page_elements) for table in decoder.tables
    )
    shape = ShardShape.of([*parts, *embedding, *head], settings.max_lora_rank, fullest.page_elements)
    size = num_pages * shape.page_elements * dtype.itemsize
    if available_bytes is not None and size > available_bytes:
        raise _too_large(size, f"{available_bytes / MIB:.1f} MiB are available to a rank")
    try:
        slab = AdapterSlab(shape, num_pages, settings.max_loras, dtype, device, with_identity=bool(embedding))
    except torch.OutOfMemoryError as error:
        raise _too_large(size, str(error)) from error
    sites = AdapterSites(slab, select_lora_ops(device, dtype))
    sites.attach(linears)
    ends = len(parts), len(parts) + len(embedding), len(shape.parts)
    if decoder.tables[0] is not None:
        decoder.tables[0].place.delta = sites.embedding(ends[0], ends[1])
    if decoder.tables[1] is not None:
        decoder.tables[1].place.delta = sites.head(ends[1], ends[2])
    sites.warm_up()
    decoder.adapt(sites)
    return RankAdapters(slab, spec, model_folder, device, dtype)


def _count_pages(settings: LoraSettings, shape: ShardShape, dtype: torch.dtype) -> int:
    page_bytes = shape.page_elements * dtype.itemsize
    if settings.memory_bytes is None:
        return settings.max_loras * shape.most_pages
    if settings.memory_bytes < page_bytes:
        raise SettingsError(f"{FLAG} {settings.memory_bytes} is less than one page of {page_bytes} bytes", FLAG)
    return settings.memory_bytes // page_bytes


def _too_large(size: int, why: str) -> SettingsError:
    return SettingsError(f"{size / MIB:.1f} MiB for adapters do not fit on a rank: {why}", FLAG)
