"""The gated MLP: down(activation(gate(x)) * up(x)), gate and up merged in one matmul (Shazeer 2020, GLU variants).

T tokens, H hidden size, M this rank's share of the MLP width.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear, ColumnParallelLinear, RowParallelLinear
from tandem.parallel.linear_methods import MakeMatrix
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.models.spec.arch import Activation, Gated
from tandem.workers.models.spec.parameters import LayerParams


def gating(kind: Activation, ops: FusedOps) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function activation(gate) * up of rows [gate | up]."""
    if kind is Activation.SILU:
        return ops.silu_mul
    approximate = "tanh" if kind is Activation.GELU_TANH else "none"

    def gelu_mul(gate_up_TM: torch.Tensor) -> torch.Tensor:
        gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
        return F.gelu(gate_TM, approximate=approximate) * up_TM

    return gelu_mul


class GatedMLP:
    """One layer's MLP on this rank."""

    def __init__(
        self, spec: Gated, params: LayerParams, context: ParallelContext, ops: FusedOps, make: MakeMatrix
    ) -> None:
        self._gate = gating(spec.activation, ops)
        self._gate_up = ColumnParallelLinear(*params.merged("gate_up"), context, make)
        self._down = RowParallelLinear(*params.merged("down"), context, make)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(self._gate(self._gate_up(x_TH)))

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._gate_up, self._down)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._gate_up.slots()
        yield from self._down.slots()
