"""The Protocol of a device's streams, events and host memory, for code that copies beside the steps or waits for them.

Implemented in workers/platforms (and traced in tests/support), one instance per rank, shared by its threads. Only these
implementations name a device; everything else is handed one of them.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    """A point in the order of one stream's work."""

    def is_done(self) -> bool:
        """Returns whether the work before it has run. Never waits."""
        ...

    def wait(self) -> None:
        """Blocks the calling thread until then."""
        ...

    def seconds_since(self, earlier: "DeviceEvent", /) -> float:
        """Returns the time between two timed events that are done."""
        ...


class Stream(Protocol):
    """Work that the device carries out in order."""

    def wait_event(self, event: DeviceEvent, /) -> None:
        """Holds up later work of this stream, and not the calling thread, until the event is done."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until the work given so far has run."""
        ...


class Accelerator(Protocol):
    """One device as its rank's threads use it. A thread calls `activate` before anything else that touches it."""

    def activate(self) -> None:
        """Makes the device the calling thread's current one."""
        ...

    def stream(self) -> Stream:
        """Returns a new stream of this device."""
        ...

    def current_stream(self) -> Stream:
        """Returns the stream of this device that the calling thread's work goes to."""
        ...

    def use(self, stream: Stream, /) -> AbstractContextManager[object]:
        """Sends the calling thread's work to `stream` inside the context."""
        ...

    def event(self, *, timed: bool = False) -> DeviceEvent:
        """Records an event behind the work of the current stream."""
        ...

    def to_device(self, host: torch.Tensor, /) -> torch.Tensor:
        """Copies a small tensor to the device in the order of the current stream. `host` may be reused at once."""
        ...

    def pinned_memory(self, num_bytes: int, /) -> torch.Tensor:
        """Returns host memory, uint8, which the device reads while the host goes on."""
        ...

    def upload(self, host: torch.Tensor, target: torch.Tensor, /) -> None:
        """Copies pinned memory to the device's, both of one size, in the order of the current stream. `host` must stay
        as it is until an event recorded afterwards is done."""
        ...

    def to_host(self, tensor: torch.Tensor, /) -> torch.Tensor:
        """Copies a small tensor to host memory in the order of the current stream, to be read once an event recorded
        afterwards is done."""
        ...

    def pin(self, memory: torch.Tensor, /) -> None:
        """Registers host memory, exactly its bytes, for copies that run beside the host. OSError when the system
        refuses."""
        ...

    def unpin(self, memory: torch.Tensor, /) -> None:
        """Ends the registration, before the memory is freed."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until all streams' work has run."""
        ...
