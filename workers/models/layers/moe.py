"""A mixture of experts: a router chooses for each token the experts that compute it, whose outputs are added.

The ranks of a stage hold a part of each expert's columns, or with --enable-expert-parallel whole experts, each others;
either way one all-reduce adds up what they computed. Each expert multiplies only its own tokens. T tokens, E experts,
K of them per token, H hidden size.
"""

from collections.abc import Iterator

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear, Linear
from tandem.parallel.linear_methods import MakeMethod
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.models.layers.mlp import gating
from tandem.workers.models.layers.routing import Router
from tandem.workers.models.spec.arch import Moe
from tandem.workers.models.spec.parameters import LayerParams


class _Expert:
    """One expert on this rank: its output, or this rank's part of it."""

    def __init__(
        self, spec: Moe, params: LayerParams, context: ParallelContext, ops: FusedOps, make: MakeMethod
    ) -> None:
        self._middle = gating(spec.activation, ops)
        self._up = Linear(*params.merged("up"), context, make)
        self._down = Linear(*params.merged("down"), context, make)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._down(self._middle(self._up(x_TH)))

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._up.slots()
        yield from self._down.slots()


class _SharedExpert:
    """The expert that every token passes, of which ranks have parts; times a sigmoid of its own gate, which every rank
    has, if it has one."""

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
        self._expert = _Expert(spec, shared, context, ops, make)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        out_TH = self._expert(x_TH)
        return out_TH if self._gate is None else out_TH * self._gate(x_TH).sigmoid()

    def slots(self) -> Iterator[ParameterSlot]:
        if self._gate is not None:
            yield from self._gate.slots()
        yield from self._expert.slots()


class MixtureOfExperts:
    """One layer's experts on this rank, and the router, which every rank has. Ranks have parts of a shared expert."""

    def __init__(
        self, spec: Moe, params: LayerParams, context: ParallelContext, ops: FusedOps, make: MakeMethod
    ) -> None:
        self._context = context
        self._router = Router(spec, params)
        self._experts = {
            index: _Expert(spec, expert, context, ops, make)
            for index, expert in enumerate(params.experts)
            if all(param.local_elements(context.mesh) for param in expert)
        }
        self._shared: _SharedExpert | None = None
        if params.shared is not None:
            self._shared = _SharedExpert(spec, params, params.shared, context, ops, make)

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        weight_TK, expert_TK = self._router(x_TH)
        out_TH = torch.zeros_like(x_TH) if self._shared is None else self._shared(x_TH)
        for index in expert_TK.unique().tolist():
            expert = self._experts.get(index)
            if expert is not None:
                token, place = (expert_TK == index).nonzero(as_tuple=True)
                own_TH = expert(x_TH[token]) * weight_TK[token, place, None].to(x_TH.dtype)
                out_TH.index_add_(0, token, own_TH)
        return out_TH if self._context.tp_size == 1 else self._context.tp.all_reduce(out_TH)

    def linears(self) -> Iterator[AdaptableLinear]:
        """Yields nothing: adapters change neither experts nor the router."""
        yield from ()

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._router.slots()
        if self._shared is not None:
            yield from self._shared.slots()
        for expert in self._experts.values():
            yield from expert.slots()
