"""load() fills a rank's parameters with its slices of a checkpoint, or with seeded random values.

Called by the decoder's builder with the slots of its layers. Only this rank's slices are read, on threads, ahead of the
parameter that is converted and packed (stored/read_ahead.py). So the peak is the shard, what is read ahead, which is
bounded, and one parameter that is converted.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from tqdm import tqdm

from tandem.parallel.mesh import Mesh
from tandem.parallel.params import Init, Param

DUMMY_DEVIATION = 0.02
HELD_AS: dict[str | None, torch.dtype] = {"float32": torch.float32}
"""The dtypes of parameters that are not held in the model's."""
LoadFormat = Literal["safetensors", "gguf", "dummy"]
OnBytes = Callable[[int, int], None]
"""A callback for progress: bytes loaded, bytes in all."""


class Holder(Protocol):
    """An owner of weights. nbytes: that it holds."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """Parameters to be loaded into one tensor, one behind the other along dim 0 (q, k and v; gate and up), so that
    merged layers need no second copy."""

    params: tuple[Param, ...]
    # takes this rank's tensor, in the model's dtype unless the parameters have their own, and on its final device
    accept: Callable[[torch.Tensor], None]
    holder: Holder | None = None  # keeps a form of its own; None: the tensor is kept
    as_stored: bool = False  # the tensor has the checkpoint's dtype
    keeps: bool = True  # False: `accept` keeps nothing of the tensor, whose memory is used again

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the tensor's shape on a rank."""
        shapes = [param.local_shape(mesh) for param in self.params]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


class Share(NamedTuple):
    """A rank's part of a parameter: indices [start, start + length) along `dim`."""

    param: Param
    dim: int
    start: int
    length: int


class Found(Protocol):
    """The shares of one slot, read. Valid until the next are asked for. dtype: the checkpoint's of the first, None
    without any."""

    dtype: torch.dtype | None

    def share(self, place: int) -> torch.Tensor:
        """Returns a share, in the checkpoint's dtype; random ones are on their device, others on the CPU. place: its
        index in what was asked for."""
        ...

    def merged(self, device: torch.device, *, keeps: bool) -> torch.Tensor | None:
        """Returns all shares as one tensor in the checkpoint's dtype, one behind the other and flat, where they were
        read so on that device, else None. keeps: the caller keeps it."""
        ...


class WeightSource(Protocol):
    """A reader of checkpoint slices."""

    def in_turn(self, wanted: Sequence[tuple[Share, ...]]) -> Iterator[Found]:
        """Yields the shares of each slot, in order."""
        ...


def load(
    slots: Sequence[ParameterSlot],
    source: WeightSource,
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
    sizes = [sum(param.local_bytes(place, dtype.itemsize) for param in slot.params) for slot in slots]
    total, holders = sum(sizes), {id(slot.holder): slot.holder for slot in slots if slot.holder is not None}
    shares = [_shares(slot, place) for slot in slots]
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=not progress) as bar:
        loaded = held = 0
        for slot, num_bytes, wanted, found in zip(slots, sizes, shares, source.in_turn(shares), strict=True):
            if on_bytes is not None:
                on_bytes(loaded, total)
            tensor = _assemble(slot, wanted, found, dtype, device, place)
            loaded += num_bytes
            bar.update(num_bytes)
            slot.accept(tensor)
            del tensor  # before the next one is made
            held += num_bytes if slot.holder is None else 0
    if on_bytes is not None:
        on_bytes(total, total)
    return held + sum(holder.nbytes for holder in holders.values())


def _shares(slot: ParameterSlot, mesh: Mesh) -> tuple[Share, ...]:
    """Returns this rank's shares of a slot's parameters, but for those of which it has none."""
    found = []
    for param in slot.params:
        span = param.span(param.shard.dim, mesh)
        if (present := min(span.start + span.length, span.total) - span.start) > 0:
            found.append(Share(param, param.shard.dim, span.start, present))
    return tuple(found)


def _assemble(
    slot: ParameterSlot, wanted: tuple[Share, ...], found: Found, dtype: torch.dtype, device: torch.device, mesh: Mesh
) -> torch.Tensor:
    """Returns a slot's tensor: what was read, or a new one with its shares copied in and padding zeroed."""
    if slot.params[0].source.whole:
        return found.share(0).to(device, copy=True)
    shape = slot.local_shape(mesh)
    stored = found.dtype or dtype
    kept = stored if slot.as_stored else HELD_AS.get(slot.params[0].dtype, dtype)
    is_all = sum(share.length * _others(share) for share in wanted) == torch.Size(shape).numel()
    if wanted and stored is kept and is_all:
        merged = found.merged(device, keeps=slot.keeps)
        if merged is not None:
            return merged.view(shape)
    tensor = torch.empty(shape, dtype=kept, device=device)
    offset, place = 0, 0
    for param in slot.params:
        rows = param.local_shape(mesh)[0]
        target = tensor[offset : offset + rows]
        offset += rows
        share = wanted[place] if place < len(wanted) and wanted[place].param is param else None
        present = 0 if share is None else share.length
        if present < target.shape[param.shard.dim]:
            target.zero_()
        if share is not None:
            copy_share(found.share(place), target.narrow(share.dim, 0, present))
            place += 1
    return tensor


def copy_share(share: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a tensor into another of its shape. On its way to a device it is converted and turned around there, where
    copy_() would do both on the host."""
    is_plain = share.dtype == target.dtype and share.is_contiguous() and target.is_contiguous()
    target.copy_(share if is_plain else share.to(target.device))


def _others(share: Share) -> int:
    """Returns the elements of a share at each index of its dimension."""
    return share.param.num_elements // share.param.shape[share.dim]


class DummySource:
    """Generates seeded random values by tensor name, so that every TP and PP degree has the same model on one kind of
    device, where they are made (None: by default). Needs no file."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._seed = seed
        self._dtype = dtype
        self._device = device or torch.get_default_device()

    def in_turn(self, wanted: Sequence[tuple[Share, ...]]) -> Iterator[Found]:
        for shares in wanted:
            yield MadeShares(tuple(self.read(*share) for share in shares))

    def read(self, param: Param, dim: int, start: int, length: int) -> torch.Tensor:
        """Returns indices [start, start + length) along `dim` of a parameter."""
        if param.init is not Init.NORMAL:
            whole = torch.full(param.shape, float(param.init is Init.ONES), dtype=self._dtype, device=self._device)
        else:
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {param.name}".encode()))
            whole = torch.empty(param.shape, dtype=self._dtype, device=self._device)
            whole.normal_(0, DUMMY_DEVIATION, generator=generator)
        return whole.narrow(dim, start, length)


class MadeShares:
    """Shares that were made up."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors
        self.dtype = tensors[0].dtype if tensors else None

    def share(self, place: int) -> torch.Tensor:
        return self._tensors[place]

    def merged(self, device: torch.device, *, keeps: bool) -> torch.Tensor | None:
        return None
