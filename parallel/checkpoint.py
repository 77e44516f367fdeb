"""Reads a rank's slices out of a checkpoint folder: safetensors, one file or an index, or seeded random values.

Called by the decoder's builder with the slots of its layers. Only the slices of this rank are read (safetensors maps
the file; pages that no slice touches are never loaded), one parameter at a time: the peak is the shard and one more.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from configs.errors import SettingsError
from parallel.shard import Fill, ShardSpec, Slice, WeightSlot

LoadFormat = Literal["safetensors", "dummy"]
INDEX = "model.safetensors.index.json"
DUMMY_DEVIATION = 0.02
OnBytes = Callable[[int, int], None]
"""Told how many bytes are loaded, of how many."""


class Source(Protocol):
    """Where slices come from."""

    def read(self, part: Slice, fill: Fill) -> torch.Tensor:
        """The slice without its padding, in the checkpoint's dtype, on the CPU."""
        ...


def load(
    slots: Sequence[WeightSlot],
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    on_bytes: OnBytes | None = None,
) -> int:
    """Fills every slot in order; returns the bytes handed out. `progress` shows a bar on stderr (rank 0 only);
    on_bytes is called before the first slot and after each."""
    total = sum(torch.Size(slot.shard.shape).numel() for slot in slots) * dtype.itemsize
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar:
        loaded = 0
        for slot in slots:
            if on_bytes is not None:
                on_bytes(loaded, total)
            tensor = assemble(slot.shard, source, dtype, device)
            loaded += tensor.nbytes
            bar.update(tensor.nbytes)
            slot.accept(tensor)
    if on_bytes is not None:
        on_bytes(total, total)
    return total


def assemble(shard: ShardSpec, source: Source, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """One parameter: its slices copied into a tensor of its own, padding zeroed."""
    tensor = torch.empty(shard.shape, dtype=dtype, device=device)
    offset = 0
    for part in shard.slices:
        rows = part.shape[0]
        target = tensor[offset : offset + rows]
        present = part.present_end - part.start
        if present < part.end - part.start:
            target.zero_()
            target = target.narrow(part.dim, 0, present)
        if present:
            target.copy_(source.read(part, shard.fill))
        offset += rows
    return tensor


class SafetensorsSource:
    """A checkpoint folder. `expected`: all names that the model has, on whatever rank; ignored ones may be there."""

    def __init__(self, folder: Path, expected: Iterable[str], ignored_suffixes: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._index()
        wanted = set(expected)
        for name, file in sorted(self._file_of.items()):
            if name not in wanted and not name.endswith(ignored_suffixes):
                raise SettingsError(f"{folder / file}: tensor {name} does not belong to the model", "MODEL")
        for name in sorted(wanted):
            if name not in self._file_of:
                raise SettingsError(f"{folder}: tensor {name} is in none of its safetensors files", "MODEL")

    def read(self, part: Slice, fill: Fill) -> torch.Tensor:
        file = self._file_of[part.name]
        try:
            view = self._open(file).get_slice(part.name)
        except SafetensorError as error:
            raise SettingsError(f"{self._folder / file}: tensor {part.name}: {error}", "MODEL") from error
        shape = tuple(view.get_shape())
        if shape != part.full_shape:
            raise SettingsError(
                f"{self._folder / file}: tensor {part.name} has shape {list(shape)}, "
                f"config.json makes it {list(part.full_shape)}",
                "MODEL",
            )
        if part.start == 0 and part.present_end == shape[part.dim]:
            return view[:]
        index = [slice(None)] * part.dim + [slice(part.start, part.present_end)]
        return view[tuple(index)]

    def _index(self) -> dict[str, str]:
        """Tensor name to file name, from the index file or from the headers of all files."""
        index = self._folder / INDEX
        if index.exists():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise SettingsError(f"{index} is not a safetensors index: {error!r}", "MODEL") from error
        files = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not files:
            raise SettingsError(f"{self._folder} holds no .safetensors file", "MODEL")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise SettingsError(f"cannot read {path}: {error}", "MODEL") from error
        return self._files[file]


class DummySource:
    """Seeded random values by tensor name, so that every TP and PP degree sees the same model. Needs no file."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self._dtype = dtype

    def read(self, part: Slice, fill: Fill) -> torch.Tensor:
        if fill is not Fill.NORMAL:
            whole = torch.full(part.full_shape, float(fill is Fill.ONES), dtype=self._dtype)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {part.name}".encode()))
            whole = torch.empty(part.full_shape, dtype=self._dtype).normal_(0, DUMMY_DEVIATION, generator=generator)
        return whole.narrow(part.dim, part.start, part.present_end - part.start)
