"""SafetensorsSource: a rank's slices of a checkpoint folder of safetensors, one file or an index, or of GGUF
files, for load() (parallel/checkpoint.py). What is read ahead (read_ahead.py) is handed out as tensors."""

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from tandem.parallel.checkpoint import Found, Share
from tandem.parallel.stored.gguf_kinds import BLOCK_NAMES
from tandem.parallel.stored.read_ahead import Bounds, ReadAhead, ReadSlices
from tandem.parallel.stored.slices import Slice, slice_of
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint

DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    **dict.fromkeys(BLOCK_NAMES, torch.uint8),
}


class SafetensorsSource:
    """Reads a checkpoint's slices ahead of the caller. SettingsError, with file and tensor, for what cannot be read.
    bounds: of the memory for what is read ahead."""

    def __init__(self, checkpoint: StoredCheckpoint, bounds: Bounds = Bounds()) -> None:
        self._checkpoint = checkpoint
        self._bounds = bounds

    def in_turn(self, wanted: Sequence[tuple[Share, ...]]) -> Iterator[Found]:
        groups = [tuple(map(self._slice, shares)) for shares in wanted]
        yield from map(ReadShares, ReadAhead(groups, self._bounds))

    def _slice(self, share: Share) -> Slice:
        return slice_of(share.param, self._checkpoint.tensors_of(share.param), share.dim, share.start, share.length)


class ReadShares:
    """Shares that were read from files."""

    def __init__(self, read: ReadSlices) -> None:
        self._read = read
        self.dtype = DTYPES[read.slices[0].dtype] if read.slices else None

    def share(self, place: int) -> torch.Tensor:
        stands = self._read.slices[place]
        dtype, data = DTYPES[stands.dtype], self._read.bytes_of(place)
        if data.storage_offset() % dtype.itemsize:  # behind shares of a smaller dtype
            data = data.clone()
        tensor = data.view(dtype).view(stands.shape)
        if stands.transposed:
            tensor = tensor.T
        if stands.pieces is not None:
            rows = torch.cat([torch.arange(first, first + count) for first, count in stands.pieces])
            tensor = tensor[rows]
        return tensor + stands.add if stands.add else tensor

    def merged(self, device: torch.device, *, keeps: bool) -> torch.Tensor | None:
        slices = self._read.slices
        if self._read.data.device != device or not all(one.is_plain and one.dtype == slices[0].dtype for one in slices):
            return None
        data = self._read.keep() if keeps else self._read.data
        return data.view(DTYPES[slices[0].dtype])
