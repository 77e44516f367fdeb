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


def activation(kind: Activation, ops: FusedOps) -> Middle:
    """Returns an activation, which may overwrite its input."""
    return partial(ops.activate, kind=kind, gated=False)


def gating(kind: Activation, ops: FusedOps) -> Middle:
    """Returns the function activation(gate) * up of rows [gate | up]."""
    return ops.silu_mul if kind is Activation.SILU else partial(ops.activate, kind=kind, gated=True)


class MLP:
    """One layer's MLP on this rank."""

    def __init__(
        self, spec: Gated | Plain, params: LayerParams, context: ParallelContext, ops: FusedOps, make: MakeMethod
    ) -> None:
        middle = gating if isinstance(spec, Gated) else activation
        self._middle = middle(spec.activation, ops)
        self._up = ColumnParallelLinear(*params.merged("up"), context, make)
        self._down = RowParallelLinear(*params.merged("down"), context, make)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(self._middle(self._up(x_TH)))

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._up, self._down)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._up.slots()
        yield from self._down.slots()
