"""Which layers of a rank stay on its device and which stream through it: arithmetic from budgets, pure and torch-free.

Asked by workers/rank/placing.py before weights are read and by `tandem plan`. A streamed layer is kept in host memory
and copied, each time it is due, into one of BUFFERS buffers on the device that all streamed layers of the rank share
(weight_stream.py), so S streamed layers free S - BUFFERS layers of device memory.
"""

from dataclasses import dataclass

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """One rank's layers: how many there are, bytes of one's matrices, and which of them stream (counted from 0)."""

    num_layers: int
    layer_bytes: int
    streamed: tuple[int, ...] = ()

    @property
    def num_resident(self) -> int:
        return self.num_layers - len(self.streamed)

    @property
    def host_bytes(self) -> int:
        """Kept in host memory."""
        return len(self.streamed) * self.layer_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of the device's memory, for whichever layers are passing through."""
        return min(BUFFERS, len(self.streamed)) * self.layer_bytes

    @property
    def device_bytes(self) -> int:
        """Of the device's memory, for matrices of layers: resident ones and buffers."""
        return self.num_resident * self.layer_bytes + self.buffer_bytes

    @property
    def saved_bytes(self) -> int:
        return self.num_layers * self.layer_bytes - self.device_bytes


def spread(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """num_streamed of num_layers, as far apart as can be: the copies of one overlap with the layers before it.

    The order is a ring, for the last layer of a step is followed by the first of the next: gaps around it differ by at
    most one.
    """
    assert 0 <= num_streamed <= num_layers, (num_streamed, num_layers)
    return tuple((2 * place + 1) * num_layers // (2 * num_streamed) for place in range(num_streamed))


def streamed_to_save(num_layers: int, layer_bytes: int, save_bytes: int) -> int:
    """How many layers must stream so that the device holds save_bytes less: all of them when that is not enough."""
    if save_bytes <= 0:
        return 0
    return min(num_layers, -(-save_bytes // layer_bytes) + BUFFERS)


def place_layers(num_layers: int, layer_bytes: int, save_bytes: int) -> LayerPlacement:
    """The placement in which the device holds save_bytes less of this rank's weights (--cpu-offload-gb)."""
    streamed = streamed_to_save(num_layers, layer_bytes, save_bytes)
    return LayerPlacement(num_layers, layer_bytes, spread(num_layers, streamed))


def bytes_to_save(needed_bytes: int, budget_bytes: int, asked_bytes: int = 0) -> int:
    """What the device must hold less: what the user asked for, and at least what it lacks."""
    return max(asked_bytes, needed_bytes - budget_bytes, 0)
