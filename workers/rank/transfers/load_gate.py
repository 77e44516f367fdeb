"""LoadGate: a step with an overlapped load waits for each layer's KV when it reaches the layer, not for all at once.

The lane's thread reports arrived layers; the step's thread iterates the layers of the cache through the gate. Tickets
are carried out in the order of their numbers, so one that is past the present one is over. Overlapping the load of a
layer with the computation of earlier ones is Mooncake's and CachedAttention's layer-wise prefetch. Where every core
computes there is nothing to copy with beside a step: it then waits for the whole ticket and has the cores to itself.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from tandem.offload.copies.accelerator import Accelerator, DeviceEvent

L = TypeVar("L")


class LoadGate:
    """One lane's progress. Each layer has an event, for which the device waits and not the host. by_layer False: a step
    waits for all layers at its first."""

    def __init__(self, accelerator: Accelerator, by_layer: bool = True) -> None:
        self._accelerator = accelerator
        self._by_layer = by_layer
        self._changed = threading.Condition()
        self._over = 0
        self._ticket = 0
        self._layers = 0
        self._events: list[DeviceEvent] = []
        self._closed = False

    # ---- the lane's thread ----

    def begin(self, ticket: int) -> None:
        with self._changed:
            self._ticket, self._layers = ticket, 0
            self._events = []

    def arrived(self, layer: int) -> None:
        """Called inside the copy's stream, with the layer's copies given out."""
        with self._changed:
            self._events.append(self._accelerator.event())
            self._layers = layer + 1
            self._changed.notify_all()

    def end(self, ticket: int) -> None:
        """Ends a ticket, done or failed, and all waits for it."""
        with self._changed:
            self._over = ticket
            self._changed.notify_all()

    def close(self) -> None:
        """No ticket will come any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- the step's thread ----

    def in_turn(self, layers: Iterable[L], tickets: Sequence[int], page_of: Sequence[int]) -> Iterator[L]:
        """The layers, each as soon as all tickets have brought it. page_of: the number under which the copies of each
        layer arrive."""
        for page, layer in zip(page_of, layers, strict=True):
            for ticket in tickets:
                self.wait(ticket, page)
            yield layer

    def wait(self, ticket: int, layer: int) -> None:
        """Until the layer of a ticket that was sent before the step has arrived, or the ticket is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._over >= ticket or self._has(ticket, layer))
            if self._ticket == ticket and self._over < ticket and layer < len(self._events):
                self._accelerator.current_stream().wait_event(self._events[layer])

    def _has(self, ticket: int, layer: int) -> bool:
        return self._by_layer and self._ticket == ticket and self._layers > layer
