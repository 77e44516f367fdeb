"""The MLP of a layer: down(activation(gate(x)) * up(x)) (Shazeer 2020, GLU variants), or down(activation(up(x))).

Gate and up are merged in one matmul. T tokens, H hidden size, M this rank's share of the MLP width.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear, ColumnParallelLinear, RowParallelLinear
from tandem.parallel.linear_methods import MakeMethod
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.models.spec.arch import Activation, Gated, Plain
from tandem.workers.models.spec.parameters import LayerParams

Middle = Callable[[torch.Tensor], torch.Tensor]


def gating(kind: Activation, ops: FusedOps) -> Middle:
    """Returns the function activation(gate) * up of rows [gate | up]."""
    if kind is Activation.SILU:
        return ops.silu_mul

    def gate_mul(gate_up_TM: torch.Tensor) -> torch.Tensor:
        gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
        return ops.activate(gate_TM, kind) * up_TM

    return gate_mul


class MLP:
    """One layer's MLP on this rank."""

    def __init__(
        self, spec: Gated | Plain, params: LayerParams, context: ParallelContext, ops: FusedOps, make: MakeMethod
    ) -> None:
        self._middle = (
            gating(spec.activation, ops) if isinstance(spec, Gated) else partial(ops.activate, kind=spec.activation)
        )
        self._up = ColumnParallelLinear(*params.merged("up"), context, make)
        self._down = RowParallelLinear(*params.merged("down"), context, make)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(self._middle(self._up(x_TH)))

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._up, self._down)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._up.slots()
        yield from self._down.slots()
