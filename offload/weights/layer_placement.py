"""Chooses which layers of a rank stay on its device and which stream through it. Pure arithmetic, torch-free.

Called by workers/planning/placing.py before weights are read, and by `tandem plan`. A streamed layer is kept in host
memory and copied, each time it is due, into one of BUFFERS buffers on the device that all streamed layers of the rank
share (weight_stream.py), so S streamed layers free S - BUFFERS layers of device memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

BUFFERS = 2


@dataclass(frozen=True, slots=True)
class LayerPlacement:
    """The placement of one rank's layers. layer_bytes: the matrices of one of the layers that may stream; streamed:
    indices from 0 on this rank; fixed: the number of layers that may not stream."""

    num_layers: int
    layer_bytes: int
    streamed: tuple[int, ...] = ()
    fixed: int = 0

    @property
    def num_resident(self) -> int:
        return self.num_layers - len(self.streamed)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the streamed layers take."""
        return len(self.streamed) * self.layer_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of device memory that the shared buffers take."""
        return min(BUFFERS, len(self.streamed)) * self.layer_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that matrices of the layers that may stream take, resident or in buffers."""
        return (self.num_resident - self.fixed) * self.layer_bytes + self.buffer_bytes

    @property
    def saved_bytes(self) -> int:
        return (self.num_layers - self.fixed) * self.layer_bytes - self.device_bytes


def spread(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """Returns num_streamed of num_layers layers, evenly spaced: one layer's copies overlap with the layers before it.

    The order is a ring, since the first layer of the next step follows the last: gaps around it differ by at most one.
    """
    assert 0 <= num_streamed <= num_layers, (num_streamed, num_layers)
    return tuple((2 * place + 1) * num_layers // (2 * num_streamed) for place in range(num_streamed))


def streamed_to_save(num_layers: int, layer_bytes: int, save_bytes: int) -> int:
    """Returns the number of layers to stream so that the device saves save_bytes: all layers when that is not
    enough."""
    if save_bytes <= 0:
        return 0
    return min(num_layers, -(-save_bytes // layer_bytes) + BUFFERS)


def place_layers(
    num_layers: int, layer_bytes: int, save_bytes: int, may_stream: Sequence[int] | None = None
) -> LayerPlacement:
    """Returns the placement that saves save_bytes of this rank's weights on the device (--cpu-offload-gb). may_stream:
    which layers may, of layer_bytes each; None: all."""
    candidates = range(num_layers) if may_stream is None else may_stream
    count = len(candidates)
    streamed = tuple(candidates[place] for place in spread(count, streamed_to_save(count, layer_bytes, save_bytes)))
    return LayerPlacement(num_layers, layer_bytes, streamed, num_layers - count)


def bytes_to_save(needed_bytes: int, budget_bytes: int, asked_bytes: int = 0) -> int:
    """Returns the bytes to save on the device: at least asked_bytes, which the user set, and what the budget lacks."""
    return max(asked_bytes, needed_bytes - budget_bytes, 0)
