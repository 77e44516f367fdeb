"""The gated MLP: down(activation(gate(x)) * up(x)), gate and up merged in one matmul (Shazeer 2020, GLU variants).

T tokens, H hidden size, M this rank's share of the MLP width.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from parallel.context import ParallelContext
from parallel.linear import ColumnParallelLinear, RowParallelLinear, Section
from parallel.shard import WeightSlot, even_range
from workers.models.spec import Activation, ArchSpec
from workers.models.weight_names import WeightNames


def activation_function(kind: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gate's activation; silu overwrites its input, which nobody else reads."""
    if kind is Activation.SILU:
        return lambda gate_TM: F.silu(gate_TM, inplace=True)
    if kind is Activation.GELU:
        return F.gelu
    assert kind is Activation.GELU_TANH
    return lambda gate_TM: F.gelu(gate_TM, approximate="tanh")


class GatedMLP:
    """One layer's MLP on this rank."""

    def __init__(self, spec: ArchSpec, names: WeightNames, layer: int, context: ParallelContext) -> None:
        width = spec.intermediate_size
        start, length = even_range(width, context.tp_rank, context.tp_size)
        sections = [Section(names.of_layer(layer, stem), width, start, length) for stem in (names.gate, names.up)]
        down = names.of_layer(layer, names.down)
        self._width = length
        self._activate = activation_function(spec.activation)
        self._gate_up = ColumnParallelLinear(spec.hidden_size, sections, spec.mlp_bias)
        self._down = RowParallelLinear(down, width, spec.hidden_size, spec.mlp_bias, context)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        gate_TM, up_TM = self._gate_up(x_TH).split(self._width, dim=-1)
        return self._down(self._activate(gate_TM) * up_TM)

    def slots(self) -> Iterator[WeightSlot]:
        yield from self._gate_up.slots()
        yield from self._down.slots()
