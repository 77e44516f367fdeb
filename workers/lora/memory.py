"""All that a rank has for adapters: the slab, the sites in its decoder, the movers. Made by workers/rank/loading.py.

Sizes the slab: --lora-memory-bytes, or room for max_loras adapters of max_lora_rank on every linear layer of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.environment import adapter_cache_folder
from configs.errors import SettingsError
from configs.schema import LoraSettings
from parallel.linear import Delta
from workers.adapter_pages import FLAG, device_pages
from workers.channel import REMOTES, MoverKind
from workers.kernels.lora import LoraOps, select_lora_ops
from workers.lora.layout import ShardShape, in_pieces
from workers.lora.movers import HostCopies, PlaceMover, ShardReader, SourceMover
from workers.lora.sites import AdapterSites
from workers.lora.slab import AdapterSlab
from workers.models.decoder import Decoder
from workers.models.spec import ArchSpec
from workers.rank.kv_mover import MoverThread
from workers.rank.mover_inbox import Inbox

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
        read = ShardReader(self.spec, self.model_folder, self.slab, adapter_cache_folder(), self.dtype, pin=pin)
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
    shape, num_pages = _cut(settings, spec, decoder, dtype, pp_size)
    size = num_pages * shape.page_elements * dtype.itemsize
    if available_bytes is not None and size > available_bytes:
        raise _too_large(size, f"{available_bytes / MIB:.1f} MiB are available to a rank")
    has_embedding = decoder.tables[0] is not None
    try:
        slab = AdapterSlab(shape, num_pages, settings.max_loras, dtype, device, with_identity=has_embedding)
    except torch.OutOfMemoryError as error:
        raise _too_large(size, str(error)) from error
    _attach(slab, select_lora_ops(device, dtype), decoder)
    return RankAdapters(slab, spec, model_folder, device, dtype)


def _cut(
    settings: LoraSettings, spec: ArchSpec, decoder: Decoder, dtype: torch.dtype, pp_size: int
) -> tuple[ShardShape, int]:
    """This rank's sections, those of its layers, then the pieces of its tables; and how many pages it gets."""
    parts = [part for linear in decoder.linears() for part in linear.parts]
    of_a_layer = parts[: len(parts) // decoder.num_local_layers]
    most_layers = -(-spec.num_layers // pp_size)
    fullest = ShardShape.of(of_a_layer * most_layers, settings.max_lora_rank)
    for table in decoder.tables:
        if table is not None:
            parts += in_pieces(table.part, fullest.page_elements)
    shape = ShardShape.of(parts, settings.max_lora_rank, fullest.page_elements)
    return shape, device_pages(settings, fullest.page_elements * dtype.itemsize, fullest.most_pages)


def _attach(slab: AdapterSlab, ops: LoraOps, decoder: Decoder) -> None:
    """Deltas for all places of the decoder, in the order of the slab's sections; ready to be used."""
    sites = AdapterSites(slab, ops)
    first = sites.attach(decoder.linears())
    makers: tuple[Callable[[int, int], Delta], ...] = (sites.embedding, sites.head)
    for table, make in zip(decoder.tables, makers, strict=True):
        if table is not None:
            last = first + len(in_pieces(table.part, slab.shape.page_elements))
            table.place.delta = make(first, last)
            first = last
    assert first == len(slab.shape.parts), "sections without a place"
    sites.warm_up()
    decoder.adapt(sites)


def _too_large(size: int, why: str) -> SettingsError:
    return SettingsError(f"{size / MIB:.1f} MiB for adapters do not fit on a rank: {why}", FLAG)
