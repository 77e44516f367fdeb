"""Reads a rank's slices of a checkpoint folder: safetensors, one file or an index, or seeded random values.

Called by the decoder's builder with the slots of its layers. Only this rank's slices are read, one parameter at a time
(safetensors maps the file, and untouched pages are never loaded), so the peak is the shard and one more parameter.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from tandem.configs.errors import SettingsError
from tandem.parallel.params import Init, ParameterSlot, ShardSpec, Slice

LoadFormat = Literal["safetensors", "dummy"]
INDEX = "model.safetensors.index.json"
DUMMY_DEVIATION = 0.02
OnBytes = Callable[[int, int], None]
"""A callback for progress: bytes loaded, bytes in all."""


class Source(Protocol):
    """A reader of checkpoint slices."""

    def read(self, part: Slice, init: Init) -> torch.Tensor:
        """Returns the slice without its padding, in the checkpoint's dtype, on the CPU. `init`: the values of a random
        checkpoint."""
        ...


def load(
    slots: Sequence[ParameterSlot],
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    on_bytes: OnBytes | None = None,
) -> int:
    """Fills every slot in order and returns the total bytes.

    `progress` shows a bar on stderr (rank 0 only). on_bytes is called before the first slot and after each.
    """
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
    """Returns one parameter: a new tensor with its slices copied in and its padding zeroed."""
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
            target.copy_(source.read(part, shard.init))
        offset += rows
    return tensor


class SafetensorsSource:
    """Reads a checkpoint folder. SettingsError for missing, foreign or unreadable tensors and for shapes unlike
    config.json's.

    `expected`: all tensor names of the model, on whatever rank; tensors with one of ignored_suffixes may be present
    too. base_prefix: what names begin with unless the checkpoint is of the model without its head, as embedding models
    are saved (model.layers.0... and layers.0...).
    """

    def __init__(
        self, folder: Path, expected: Iterable[str], ignored_suffixes: tuple[str, ...] = (), base_prefix: str = ""
    ) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        wanted = set(expected)
        stored = self._index()
        self._stored_name = dict(zip(_whole_names(stored, wanted, base_prefix), stored, strict=True))
        self._file_of = {name: stored[theirs] for name, theirs in self._stored_name.items()}
        for name, file in sorted(self._file_of.items()):
            if name not in wanted and not name.endswith(ignored_suffixes):
                raise SettingsError(f"{folder / file}: tensor {name} does not belong to the model", "MODEL")
        for name in sorted(wanted):
            if name not in self._file_of:
                raise SettingsError(f"{folder}: tensor {name} is in none of its safetensors files", "MODEL")

    def read(self, part: Slice, init: Init) -> torch.Tensor:
        file = self._file_of[part.name]
        try:
            view = self._open(file).get_slice(self._stored_name[part.name])
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
        """Returns tensor name -> file name, from the index file or from the headers of all files."""
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
                self._files[file] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise SettingsError(f"cannot read {path}: {error}", "MODEL") from error
        return self._files[file]


def _whole_names(stored: Iterable[str], wanted: set[str], base_prefix: str) -> list[str]:
    """Returns the stored names, in their order, as a checkpoint with a head would have them."""
    names = list(stored)
    if any(name.startswith(base_prefix) for name in names):
        return names
    return [base_prefix + name if base_prefix + name in wanted else name for name in names]


class DummySource:
    """Generates seeded random values by tensor name, so that every TP and PP degree has the same model. Needs no
    file."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._seed = seed
        self._dtype = dtype

    def read(self, part: Slice, init: Init) -> torch.Tensor:
        if init is not Init.NORMAL:
            whole = torch.full(part.full_shape, float(init is Init.ONES), dtype=self._dtype)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {part.name}".encode()))
            whole = torch.empty(part.full_shape, dtype=self._dtype).normal_(0, DUMMY_DEVIATION, generator=generator)
        return whole.narrow(part.dim, part.start, part.present_end - part.start)
