"""A mixture of experts: a router chooses for each token the experts that compute it, whose outputs are added.

The ranks of a stage hold a part of each expert's columns, or with --enable-expert-parallel whole experts, each others;
either way one all-reduce adds up what they computed. Tokens are sorted by expert, so that each projection is one
grouped product, which reads only experts that have tokens. T tokens, E experts, K of them per token, P = T * K pairs, H
hidden size, M this rank's share of an expert's width.
"""

from collections.abc import Iterator
from functools import partial

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.expert_methods import ExpertParams
from tandem.parallel.linear import AdaptableLinear, Linear
from tandem.parallel.linear_methods import MakeMethod
from tandem.workers.kernels.expert_ops import ExpertOps
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.models.layers.mlp import gating
from tandem.workers.models.layers.routing import Router
from tandem.workers.models.spec.arch import Moe
from tandem.workers.models.spec.parameters import LayerParams


class _SharedExpert:
    """The expert that every token passes, of which ranks have parts, and its gate, which every rank has, if it has
    one."""

    def __init__(
        self,
        spec: Moe,
        layer: LayerParams,
        shared: LayerParams,
        context: ParallelContext,
        ops: FusedOps,
        make: MakeMethod,
    ) -> None:
        self._gate = Linear(*layer.merged("shared_gate"), context, make) if spec.shared_gated else None
        self._middle = gating(spec.activation, ops)
        self._up = Linear(*shared.merged("up"), context, make)
        self._down = Linear(*shared.merged("down"), context, make)

    def __call__(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns its output, or this rank's part of it, and the gate [T, 1], before the sigmoid."""
        return self._down(self._middle(self._up(x_TH))), None if self._gate is None else self._gate(x_TH)

    def slots(self) -> Iterator[ParameterSlot]:
        if self._gate is not None:
            yield from self._gate.slots()
        yield from self._up.slots()
        yield from self._down.slots()


class MixtureOfExperts:
    """One layer's experts on this rank, and the router, which every rank has. Ranks have parts of a shared expert.

    loads_E: tokens that each expert of the layer has got since the start, int64, those of other ranks included.
    """

    def __init__(
        self,
        spec: Moe,
        params: LayerParams,
        context: ParallelContext,
        ops: FusedOps,
        make: MakeMethod,
        experts: ExpertOps,
    ) -> None:
        self._context = context
        self._ops = experts
        self._router = Router(spec, params, experts)
        here = [i for i, each in enumerate(params.experts) if all(p.local_elements(context.mesh) for p in each)]
        self._here = range(here[0], here[-1] + 1)
        own = params.experts[here[0] : here[-1] + 1]
        swiglu = spec.swiglu
        self._middle = gating(spec.activation, ops) if swiglu is None else partial(experts.clamped_swiglu, swiglu)
        self._up = experts.method([ExpertParams(*each.merged("up")) for each in own], context)
        self._down = experts.method([ExpertParams(*each.merged("down")) for each in own], context)
        self._loads = experts.loads(spec.num_experts + 1)  # the last one counts padding
        self.loads_E = self._loads[:-1]
        self._shared: _SharedExpert | None = None
        if params.shared is not None:
            self._shared = _SharedExpert(spec, params, params.shared, context, ops, make)

    def __call__(self, x_TH: torch.Tensor, real_T: torch.Tensor | None = None) -> torch.Tensor:
        """Returns [T, H]. real_T: bool, the tokens that are no padding, which is computed by no expert; None: all."""
        weight_TK, expert_TK = self._router(x_TH)
        if real_T is not None:
            expert_TK = torch.where(real_T[:, None], expert_TK, len(self.loads_E))
        groups = self._ops.group(expert_TK, self._here, self._loads)
        hidden_PM = self._middle(self._up.apply(x_TH, groups, gathers=True))
        y_PH = self._down.apply(hidden_PM, groups, gathers=False)
        base_TH, gate_T1 = (None, None) if self._shared is None else self._shared(x_TH)
        out_TH = self._ops.combine(y_PH, weight_TK, groups, base_TH, gate_T1)
        return out_TH if self._context.tp_size == 1 else self._context.tp.all_reduce(out_TH)

    def linears(self) -> Iterator[AdaptableLinear]:
        """Yields nothing: adapters change neither experts nor the router."""
        yield from ()

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._router.slots()
        if self._shared is not None:
            yield from self._shared.slots()
        yield from self._up.slots()
        yield from self._down.slots()
