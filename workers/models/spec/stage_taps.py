"""StageTaps: what a stage of the model keeps, and gets from stages before it, for a head that reads several layers.

Torch-free. Such a head (EAGLE-3) runs behind the last stage. Each stage keeps the residual stream before those of its
own layers that the head reads, and hands it on with what it has got (parallel/pipeline.py). At a border it is the stage
behind that keeps it, which has it anyway. Read by the decoder, and by what plans memory.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tandem.parallel.mesh import Mesh, layer_range


class StageTaps(NamedTuple):
    """Layers before which the residual stream is kept; the number of layers: behind the last one. passed: of earlier
    stages; own: of this one; heard: both, in the order in which the head reads them."""

    passed: tuple[int, ...] = ()
    own: tuple[int, ...] = ()
    heard: tuple[int, ...] = ()


def stage_taps(taps: Sequence[int], num_layers: int, mesh: Mesh) -> StageTaps:
    """Returns those of the stage of the rank at `mesh`. taps: of the head."""
    layers = layer_range(num_layers, mesh.pp_rank, mesh.pp_size)
    end = layers.stop + (layers.stop == num_layers)
    return StageTaps(
        tuple(tap for tap in taps if tap < layers.start),
        tuple(tap for tap in taps if layers.start <= tap < end),
        tuple(tap for tap in taps if tap < end),
    )
