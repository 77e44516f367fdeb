"""Streams weights that exceed the device's memory: layers in host memory pass through two buffers on the device.

Made by workers/models/decoder.py's builder, which passes each streamed layer's matrices to `place_of` while it reads
the checkpoint, and iterates over the layers with `in_turn`. The next layer is copied while one computes; each matrix
waits for its own bytes only. A Copier moves the bytes (weight_copiers.py).

    slot 0:  copy 0 | compute 0 | copy 2 ........ | compute 2 | copy 4 ...
    slot 1:  copy 1 ............ | compute 1 | copy 3 ...      | compute 3 ...
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from tandem.configs.errors import TandemError
from tandem.offload.weights.layer_placement import BUFFERS

T = TypeVar("T")
Copy = Callable[[], object]
Wait = Callable[[], object]
Placed = tuple[torch.Tensor, Wait | None]
"""The tensor to compute with, and a function to call before each use of it."""


class WeightCopyError(TandemError):
    """A layer's weights did not reach the device."""


class Copier(Protocol):
    """Copies bytes from host memory to the device.

    `is_inline`: copies run on the computing thread when they are due, as torch copies, so a step can be replayed with
    them.
    """

    is_inline: bool

    def hold(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the weight in host memory, in the form that `copies` reads. The given tensor is not used
        afterwards."""
        ...

    def buffer_like(self, held: torch.Tensor) -> torch.Tensor:
        """Allocates device memory of the same form, with undefined content."""
        ...

    def copies(self, target: torch.Tensor, held: torch.Tensor) -> list[Copy]:
        """Returns the copy of one matrix in pieces, for any number of calls of `start`. They keep both tensors
        alive."""
        ...

    def start(self, copies: Sequence[Copy]) -> Wait:
        """Starts the copies, behind the work that the device has been given so far, and returns a function that waits
        for them.

        An inline copier starts them only in that function. It is called before the first use of the bytes and may be
        called again; when it returns the bytes have arrived (or the device itself waits). It raises any error of a
        copy.
        """
        ...

    def close(self) -> None:
        """Ends the copies under way. Idempotent."""
        ...


class _Slot:
    """One buffer on the device, and the streamed layers that share it in turn."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.buffers: list[torch.Tensor] = []
        self.holds: int | None = None
        self.waits: list[Wait] = []

    def after(self, layer: int) -> int:
        """Returns the layer that needs this slot next: `layer` itself when it is alone, and then nothing has to
        move."""
        return self.layers[(self.layers.index(layer) + 1) % len(self.layers)]


class WeightStream:
    """The streamed layers of one rank, by their index on it. Free of cost when there are none: then it has no
    copier."""

    def __init__(self, streamed: Sequence[int], copier: Copier | None) -> None:
        assert copier is not None or not streamed, "layers stream, and nothing copies them"
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
    def can_replay(self) -> bool:
        """True if a captured step may be replayed as a list of kernels and copies."""
        return self._copier is None or not self._slot_of or self._copier.is_inline

    def invalidate(self) -> None:
        """Marks shared buffers as empty, so that their layers are copied again when due. WeightCopyError after a failed
        copy."""
        # A replayed step copies them itself, and a captured one must not rely on what is there.
        if self._failure is not None:
            raise WeightCopyError(self._failure)
        for slot in self._slots:
            if len(slot.layers) > 1:
                slot.holds, slot.waits = None, []

    def place_of(self, layer: int) -> Callable[[torch.Tensor], Placed]:
        """Returns the function that takes the layer's matrices, in order, and returns the tensor to compute with."""
        if layer not in self._slot_of:
            return lambda weight: (weight, None)
        return lambda weight: self._keep(layer, weight)

    def arrive(self, layer: int) -> None:
        """Waits until every matrix of the layer, whose turn it is, has arrived."""
        if (slot := self._slot_of.get(layer)) is not None:
            self._arrive(slot)

    def in_turn(self, layers: Iterable[T]) -> Iterator[T]:
        """Yields the layers in order, each with its weights on the device or on their way. One iteration is one
        step."""
        for index, layer in enumerate(layers):
            self._enter(index)
            yield layer
            self._leave(index)

    def begin(self) -> None:
        """Starts to copy the first layers, after all weights have been placed."""
        for slot in self._slots:
            self._start(slot, slot.layers[0])

    def close(self) -> None:
        """Ends the copies and their thread and releases the host memory. Idempotent; no step may follow."""
        if self._copier is not None:
            self._copier.close()
        for slot in self._slots:
            slot.waits = []
        self._held.clear()
        self._copies.clear()

    def _keep(self, layer: int, weight: torch.Tensor) -> Placed:
        assert self._copier is not None
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
        if slot.holds != layer:  # the previous step was interrupted
            self._start(slot, layer)

    def _leave(self, layer: int) -> None:
        slot = self._slot_of.get(layer)
        if slot is not None and slot.after(layer) != layer:
            self._start(slot, slot.after(layer))

    def _start(self, slot: _Slot, layer: int) -> None:
        """Starts to copy a layer into the slot, after earlier copies into it (of an interrupted step) have arrived."""
        assert self._copier is not None
        self._arrive(slot)
        slot.holds = layer
        slot.waits = [self._copier.start(copies) for copies in self._copies[layer]]

    def _arrive(self, slot: _Slot) -> None:
        for wait in slot.waits:
            self._await(slot, wait)

    def _await(self, slot: _Slot, wait: Wait) -> None:
        """Waits for a copy. After one has failed, every call raises WeightCopyError."""
        if self._failure is None:
            try:
                wait()
                return
            except Exception as error:
                self._failure = f"copying the weights of layer {slot.holds} from host memory failed: {error}"
        raise WeightCopyError(self._failure)


def num_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor, oneDNN's opaque ones included."""
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes


def same_form(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether the two tensors have the same layout, so that the bytes of one can be copied to the other."""
    if first.shape != second.shape or first.dtype != second.dtype or first.is_mkldnn != second.is_mkldnn:
        return False
    if first.is_mkldnn:
        describe = torch.ops.mkldnn._get_mkldnn_serialized_md
        return bool(torch.equal(describe(first), describe(second)))
    return bool(first.stride() == second.stride())
