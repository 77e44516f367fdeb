"""Adapters of a rank: the slab and the LoRA layers of its decoder. Made by workers/rank/loading.py.

Sizes the slab: --lora-memory-bytes, or room for max_loras adapters of max_lora_rank on every linear layer of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.configs.errors import SettingsError
from tandem.configs.schema import LoraSettings
from tandem.parallel.linear import LoraHook
from tandem.workers.kernels.lora_ops import LoraOps
from tandem.workers.lora.device.layout import ShardShape, in_pieces
from tandem.workers.lora.device.lora_layers import LoraLayers
from tandem.workers.lora.device.slab import AdapterSlab
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.planning.adapter_room import FLAG, device_pages, fullest_stage
from tandem.workers.platforms.base import Platform

MIB = 2**20


@dataclass(frozen=True, slots=True)
class RankAdapters:
    """Adapters of one rank, ready to be moved and used."""

    slab: AdapterSlab
    spec: ArchSpec
    model_folder: Path | None
    platform: Platform
    dtype: torch.dtype

    @property
    def num_pages(self) -> int:
        return int(self.slab.slab_PE.shape[0])

    @property
    def nbytes(self) -> int:
        return int(self.slab.memory_PE.nbytes)


def open_adapters(
    settings: LoraSettings,
    spec: ArchSpec,
    model_folder: Path | None,
    decoder: Decoder,
    platform: Platform,
    dtype: torch.dtype,
    *,
    available_bytes: int | None,
    pp_size: int,
) -> RankAdapters:
    """Allocates the slab and attaches the LoRA layers. model_folder: the checkpoint, None where the weights are random;
    available_bytes: of host memory for this rank, None where the device has its own.

    Ranks of every stage get as many pages as the fullest stage needs: the group has the least of them.
    SettingsError (--lora-memory-bytes) when there is too little memory, or too little was asked for.
    """
    shape, num_pages = _slab_shape(settings, spec, decoder, dtype, pp_size)
    size = num_pages * shape.page_elements * dtype.itemsize
    if available_bytes is not None and size > available_bytes:
        raise _too_large(size, f"{available_bytes / MIB:.1f} MiB are available to a rank")
    has_embedding = decoder.tables[0] is not None
    try:
        slab = AdapterSlab(shape, num_pages, dtype, platform, with_identity=has_embedding)
    except torch.OutOfMemoryError as error:
        raise _too_large(size, str(error)) from error
    _attach(slab, platform.lora_ops(dtype), decoder)
    return RankAdapters(slab, spec, model_folder, platform, dtype)


def _slab_shape(
    settings: LoraSettings, spec: ArchSpec, decoder: Decoder, dtype: torch.dtype, pp_size: int
) -> tuple[ShardShape, int]:
    """This rank's projections, those of its layers, then the pieces of its tables; and how many pages it gets."""
    parts = [part for linear in decoder.linears() for part in linear.parts]
    page, most_pages = fullest_stage(spec, decoder.tp_size, pp_size, settings.max_lora_rank)
    for table in decoder.tables:
        if table is not None:
            parts += in_pieces(table.part, page)
    shape = ShardShape.of(parts, settings.max_lora_rank, page)
    return shape, device_pages(settings, page * dtype.itemsize, most_pages)


def _attach(slab: AdapterSlab, ops: LoraOps, decoder: Decoder) -> None:
    """Attaches LoRA hooks to all layers of the decoder, in the order of the slab's projections; ready to be used."""
    lora_layers = LoraLayers(slab, ops)
    first = lora_layers.attach(decoder.linears())
    makers: tuple[Callable[[int, int], LoraHook], ...] = (lora_layers.embedding, lora_layers.head)
    for table, make in zip(decoder.tables, makers, strict=True):
        if table is not None:
            last = first + len(in_pieces(table.part, slab.shape.page_elements))
            table.place.lora_hook = make(first, last)
            first = last
    assert first == len(slab.shape.parts), "projections without a place"
    lora_layers.warm_up()
    decoder.adapt(lora_layers)


def _too_large(size: int, why: str) -> SettingsError:
    return SettingsError(f"{size / MIB:.1f} MiB for adapters do not fit on a rank: {why}", FLAG)
