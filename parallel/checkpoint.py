"""Reads a rank's slices of a checkpoint folder: safetensors, one file or an index, or seeded random values.

Called by the decoder's builder with the slots of its layers. Only this rank's slices are read, one parameter at a time
(safetensors maps the file, and untouched pages are never loaded), so the peak is the shard and one more parameter.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from tandem.configs.errors import SettingsError
from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Init, Param

LoadFormat = Literal["safetensors", "dummy"]
INDEX = "model.safetensors.index.json"
DUMMY_DEVIATION = 0.02
HELD_AS: dict[str | None, torch.dtype] = {"float32": torch.float32}
"""The dtypes of parameters that are not held in the model's."""
OnBytes = Callable[[int, int], None]
"""A callback for progress: bytes loaded, bytes in all."""


class Holder(Protocol):
    """An owner of weights. nbytes: that it holds."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """Parameters to be loaded into one tensor, one behind the other along dim 0 (q, k and v; gate and up), so that
    merged layers need no second copy. `accept` takes this rank's tensor, in the model's dtype unless the parameters
    have their own, and on its final device.
    holder: keeps a form of its own, None: the tensor is kept. as_stored: the tensor has the checkpoint's dtype."""

    params: tuple[Param, ...]
    accept: Callable[[torch.Tensor], None]
    holder: Holder | None = None
    as_stored: bool = False

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the tensor's shape on a rank."""
        shapes = [param.local_shape(mesh) for param in self.params]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


class Source(Protocol):
    """A reader of checkpoint slices."""

    def read(self, param: Param, dim: int, start: int, length: int) -> torch.Tensor:
        """Returns indices [start, start + length) along `dim` of a parameter, in the checkpoint's dtype, on the CPU."""
        ...


def load(
    slots: Sequence[ParameterSlot],
    source: Source,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    mesh: Mesh | None = None,
    on_bytes: OnBytes | None = None,
) -> int:
    """Fills every slot in order and returns the bytes that are held then.

    mesh: the rank's place, default a rank alone. `progress` shows a bar on stderr (rank 0 only). on_bytes is called
    before the first slot and after each.
    """
    place = Mesh() if mesh is None else mesh
    total = sum(torch.Size(slot.local_shape(place)).numel() for slot in slots) * dtype.itemsize
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar:
        loaded = held = 0
        for slot in slots:
            if on_bytes is not None:
                on_bytes(loaded, total)
            tensor = assemble(slot, source, dtype, device, place)
            num_bytes = tensor.numel() * dtype.itemsize
            loaded += num_bytes
            bar.update(num_bytes)
            slot.accept(tensor)
            del tensor  # before the next one is made
            own_bytes = sum(param.local_bytes(place, dtype.itemsize) for param in slot.params)
            held += own_bytes if slot.holder is None else slot.holder.nbytes
    if on_bytes is not None:
        on_bytes(total, total)
    return held


def assemble(slot: ParameterSlot, source: Source, dtype: torch.dtype, device: torch.device, mesh: Mesh) -> torch.Tensor:
    """Returns a slot's tensor: a new one with its parameters' shares copied in and padding zeroed."""
    tensor: torch.Tensor | None = None
    offset = 0
    for param in slot.params:
        rows = param.local_shape(mesh)[0]
        dim = param.shard.dim
        span = param.span(dim, mesh)
        present = max(0, min(span.start + span.length, span.total) - span.start)
        share = source.read(param, dim, span.start, present) if present else None
        if tensor is None:
            kept = share.dtype if slot.as_stored and share is not None else HELD_AS.get(param.dtype, dtype)
            tensor = torch.empty(slot.local_shape(mesh), dtype=kept, device=device)
        target = tensor[offset : offset + rows]
        if present < span.length:
            target.zero_()
        if share is not None:
            target.narrow(dim, 0, present).copy_(share)
        offset += rows
    assert tensor is not None, "a slot without parameters"
    return tensor


STORED_DTYPES = ("BF16", "F16", "F32")


class SafetensorsSource:
    """Reads a checkpoint folder. SettingsError for missing, foreign or unreadable tensors and for shapes unlike
    config.json's.

    `expected`: all parameters of the model, on whatever rank; tensors with one of ignored_suffixes or ignored_prefixes
    may be present too.
    base_prefix: what names begin with unless the checkpoint is of the model without its head, as embedding models are
    saved (model.layers.0... and layers.0...).
    """

    def __init__(
        self,
        folder: Path,
        expected: Iterable[Param],
        ignored_suffixes: tuple[str, ...] = (),
        base_prefix: str = "",
        ignored_prefixes: tuple[str, ...] = (),
    ) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        params = tuple(expected)
        wanted = {name for param in params for name in param.source.names}
        stored = self._index()
        self._stored_name = dict(zip(_whole_names(stored, wanted, base_prefix), stored, strict=True))
        self._file_of = {name: stored[theirs] for name, theirs in self._stored_name.items()}
        for name, file in sorted(self._file_of.items()):
            is_ignored = name.endswith(ignored_suffixes) or name.startswith(ignored_prefixes)
            if name not in wanted and not is_ignored:
                raise SettingsError(f"{folder / file}: tensor {name} does not belong to the model", "MODEL")
        for param in sorted(params, key=lambda param: param.source.names):
            self._name_of(param)

    def read(self, param: Param, dim: int, start: int, length: int) -> torch.Tensor:
        source = param.source
        view: Any = self._view(param, self._name_of(param)) if not source.joined else self._joined(param)
        if len(view.get_shape() if hasattr(view, "get_shape") else view.shape) > len(param.shape):
            view = view[source.index] if source.index is not None else view[:].flatten()
        ranges = [(0, size) for size in param.shape]
        ranges[dim] = start, length
        columns = tuple(slice(first, first + count) for first, count in ranges[1:])
        pieces = list(source.stored(*ranges[0]))
        if source.order:  # one read, as its pieces are small
            low, high = min(first for first, _ in pieces), max(first + count for first, count in pieces)
            rows = torch.cat([torch.arange(first - low, first - low + count) for first, count in pieces])
            tensor = _rows(view, low, high, columns, source.transposed)[rows]
        else:
            read = [_rows(view, first, first + count, columns, source.transposed) for first, count in pieces]
            tensor = read[0] if len(read) == 1 else torch.cat(read)
        return tensor + source.add if source.add else tensor

    def _joined(self, param: Param) -> torch.Tensor:
        """Returns the stored tensors of all names, one behind another."""
        share = replace(param, shape=(param.shape[0] // len(param.source.names), *param.shape[1:]))
        return torch.cat([self._view(share, self._stored(name))[:] for name in param.source.names])

    def _name_of(self, param: Param) -> str:
        """Returns the name under which a parameter is stored, or its last part. SettingsError when one is not."""
        if not param.source.joined:
            return self._stored(*param.source.names)
        for name in param.source.names:
            self._stored(name)
        return name

    def _stored(self, *names: str) -> str:
        """Returns the first of the names that is stored. SettingsError when none is."""
        for name in names:
            if name in self._file_of:
                return name
        words = " or ".join(names)
        raise SettingsError(f"{self._folder}: tensor {words} is in none of its safetensors files", "MODEL")

    def _view(self, param: Param, name: str) -> Any:
        """Returns the stored tensor, unread, whose shape is that of the model."""
        file = self._file_of[name]
        try:
            view = self._open(file).get_slice(self._stored_name[name])
        except SafetensorError as error:
            raise SettingsError(f"{self._folder / file}: tensor {name}: {error}", "MODEL") from error
        if (stored := view.get_dtype()) not in STORED_DTYPES:
            raise SettingsError(
                f"{self._folder / file}: tensor {name} is stored as {stored}; weights are read from "
                f"{', '.join(STORED_DTYPES)}, not from quantized checkpoints",
                "MODEL",
            )
        source, shape = param.source, tuple(view.get_shape())
        wanted = (param.shape[0] if source.rows is None else source.rows, *param.shape[1:])
        wanted = source.shape or (wanted[::-1] if source.transposed else wanted)
        if shape != wanted:
            raise SettingsError(
                f"{self._folder / file}: tensor {name} has shape {list(shape)}, config.json makes it {list(wanted)}",
                "MODEL",
            )
        return view

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


def _rows(view: Any, low: int, high: int, columns: tuple[slice, ...], transposed: bool) -> torch.Tensor:
    """Returns rows [low, high) of a stored tensor."""
    index = (slice(low, high), *columns)
    tensor: torch.Tensor = view[index[::-1]].T if transposed else view[index]
    return tensor


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

    def read(self, param: Param, dim: int, start: int, length: int) -> torch.Tensor:
        if param.init is not Init.NORMAL:
            whole = torch.full(param.shape, float(param.init is Init.ONES), dtype=self._dtype)
        else:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {param.name}".encode()))
            whole = torch.empty(param.shape, dtype=self._dtype).normal_(0, DUMMY_DEVIATION, generator=generator)
        return whole.narrow(dim, start, length)
