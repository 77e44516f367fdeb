"""Weights larger than the device: layers kept in host memory pass through two buffers, the next while one computes.

Made by workers/models/decoder.py's builder, which gives each streamed layer's matrices to `place_of` while it reads the
checkpoint and then walks its layers with `in_turn`. A matrix waits for its own bytes only, when it multiplies. Knows
bytes and layers, no request. How bytes move is a Copier: a stream of its own from pinned memory on CUDA, a thread where
the "device" is memory itself; where there is no core for it, copies wait for their matrix, which then finds them in the
cache.

    slot 0:  copy 0 | compute 0 | copy 2 ........ | compute 2 | copy 4 ...
    slot 1:  copy 1 ............ | compute 1 | copy 3 ...      | compute 3 ...
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from configs.errors import TandemError
from offload.placement import BUFFERS

T = TypeVar("T")
Copy = Callable[[], object]
Wait = Callable[[], object]
Placed = tuple[torch.Tensor, Wait | None]
"""The tensor to multiply with, and what to call before each use of it."""


class WeightCopyError(TandemError):
    """A layer's weights did not reach the device."""


class Copier(Protocol):
    """Moves bytes from host memory to the device. `is_inline`: on the thread that computes, when they are due, by
    torch's copies; a step that does the same again moves the same."""

    is_inline: bool

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in host memory, in a form that `copy` reads; the given tensor is not used afterwards."""
        ...

    def buffer_like(self, held: torch.Tensor) -> torch.Tensor:
        """Device memory of the same form, contents undefined."""
        ...

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        """The copy of one matrix in pieces, given to `start` as often as it is due. They keep both tensors alive."""
        ...

    def start(self, copies: Sequence[Copy]) -> Wait:
        """Begins the copies, after what the device was given so far and at the latest when the answer is called.
        It is called before the first use of the bytes, and may be again: when it returns they are there (or the device
        waits by itself); it raises what a copy raised.
        """
        ...

    def close(self) -> None:
        """Ends what was started. Idempotent."""
        ...


class _Slot:
    """One buffer on the device, and the streamed layers that take turns in it."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.buffers: list[torch.Tensor] = []
        self.holds: int | None = None
        self.waits: list[Wait] = []

    def after(self, layer: int) -> int:
        """The layer that needs this slot next: itself when it is alone, and then nothing has to move."""
        return self.layers[(self.layers.index(layer) + 1) % len(self.layers)]


class WeightStream:
    """The streamed layers of one rank, by their index on it. Without any, it costs nothing."""

    def __init__(self, streamed: Sequence[int], copier: Copier) -> None:
        self._copier = copier
        self._slots = [_Slot() for _ in range(min(BUFFERS, len(streamed)))]
        self._slot_of: dict[int, _Slot] = {}
        for place, layer in enumerate(sorted(streamed)):
            slot = self._slots[place % BUFFERS]
            slot.layers.append(layer)
            self._slot_of[layer] = slot
        self._held: dict[int, list[torch.Tensor]] = {layer: [] for layer in streamed}
        self._copies: dict[int, list[list[Copy]]] = {layer: [] for layer in streamed}
        self._failure: str | None = None

    @property
    def num_streamed(self) -> int:
        return len(self._slot_of)

    @property
    def host_bytes(self) -> int:
        return sum(num_bytes(held) for weights in self._held.values() for held in weights)

    @property
    def buffer_bytes(self) -> int:
        return sum(num_bytes(buffer) for slot in self._slots for buffer in slot.buffers)

    @property
    def can_repeat(self) -> bool:
        """Whether a step may be repeated by the kernels and copies that it consisted of."""
        return not self._slot_of or self._copier.is_inline

    def forget(self) -> None:
        """Layers that take turns are copied anew when they are due: a step that is repeated fills their buffers, and
        one that is recorded does not rely on what is there."""
        if self._failure is not None:
            raise WeightCopyError(self._failure)
        for slot in self._slots:
            if len(slot.layers) > 1:
                slot.holds, slot.waits = None, []

    def place_of(self, layer: int) -> Callable[[torch.Tensor], Placed]:
        """Takes each matrix of the layer, in order, and says where it lies while the layer computes."""
        if layer not in self._slot_of:
            return lambda weight: (weight, None)
        return lambda weight: self._keep(layer, weight)

    def arrive(self, layer: int) -> None:
        """Returns when every matrix of the layer, whose turn it is, has arrived."""
        if (slot := self._slot_of.get(layer)) is not None:
            self._arrive(slot)

    def in_turn(self, layers: Iterable[T]) -> Iterator[T]:
        """The layers in order, each with its weights on the way to the device or there. Every walk is one step."""
        for index, layer in enumerate(layers):
            self._enter(index)
            yield layer
            self._leave(index)

    def begin(self) -> None:
        """All weights have been placed: the first layers set off."""
        for slot in self._slots:
            self._start(slot, slot.layers[0])

    def close(self) -> None:
        """Ends copies and their thread, and lets the host memory go. Idempotent; no step may follow."""
        self._copier.close()
        for slot in self._slots:
            slot.waits = []
        self._held.clear()
        self._copies.clear()

    def _keep(self, layer: int, weight: torch.Tensor) -> Placed:
        slot, held = self._slot_of[layer], self._copier.hold(weight)
        place = len(self._held[layer])
        if place == len(slot.buffers):
            slot.buffers.append(self._copier.buffer_like(held))
        buffer = slot.buffers[place]
        assert same_form(buffer, held), (buffer.shape, held.shape)
        self._held[layer].append(held)
        self._copies[layer].append(self._copier.copies(buffer, held))
        return buffer, lambda: self._await(slot, slot.waits[place])

    def _enter(self, layer: int) -> None:
        slot = self._slot_of.get(layer)
        if slot is None:
            return
        if self._failure is not None:
            raise WeightCopyError(self._failure)
        if slot.holds != layer:  # the step before ended in the middle
            self._start(slot, layer)

    def _leave(self, layer: int) -> None:
        slot = self._slot_of.get(layer)
        if slot is not None and slot.after(layer) != layer:
            self._start(slot, slot.after(layer))

    def _start(self, slot: _Slot, layer: int) -> None:
        """Begins to fill the slot; what was under way to it (a step that ended in the middle) arrives first."""
        self._arrive(slot)
        slot.holds = layer
        slot.waits = [self._copier.start(copies) for copies in self._copies[layer]]

    def _arrive(self, slot: _Slot) -> None:
        for wait in slot.waits:
            self._await(slot, wait)

    def _await(self, slot: _Slot, wait: Wait) -> None:
        """What the slot waits for is there. Once a copy has failed the stream is of no use."""
        if self._failure is None:
            try:
                wait()
                return
            except Exception as error:
                self._failure = f"copying the weights of layer {slot.holds} from host memory failed: {error}"
        raise WeightCopyError(self._failure)


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, oneDNN's opaque ones included."""
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes


def same_form(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the bytes of one mean the same in the other."""
    if first.shape != second.shape or first.dtype != second.dtype or first.is_mkldnn != second.is_mkldnn:
        return False
    if first.is_mkldnn:
        describe = torch.ops.mkldnn._get_mkldnn_serialized_md
        return bool(torch.equal(describe(first), describe(second)))
    return bool(first.stride() == second.stride())
