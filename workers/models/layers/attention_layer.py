"""One layer's attention block: merged QKV, optional QK norm, rotation, paged attention, output projection.

T tokens, H hidden size, N query heads, K KV heads, S = N + K, D head dim; heads are this rank's.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear, ColumnParallelLinear, RowParallelLinear
from tandem.parallel.linear_methods import MakeMethod
from tandem.parallel.params import Span
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.qk_norms import make_qk_norm
from tandem.workers.models.spec.arch import AttentionParams, Gqa, LayerSpec
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams


class AttentionLayer:
    """Attention of one layer on this rank. rope: which of the model's ropes it has, None for none."""

    def __init__(
        self,
        spec: LayerSpec,
        params: LayerParams,
        context: ParallelContext,
        ops: FusedOps,
        make: MakeMethod,
        rope: int | None = None,
    ) -> None:
        attention, weights = spec.attention, params.weights
        assert isinstance(attention, Gqa)
        dim = attention.head_dim
        num_heads, num_kv_heads = (weights[role].span(0, context.mesh).length // dim for role in (Role.Q, Role.K))
        self._heads = (num_heads, num_kv_heads)
        self._head_dim = dim
        self._params = _own_heads(spec.params, weights[Role.Q].span(0, context.mesh), dim)
        self._eps = spec.norm.eps
        self._ops = ops
        self._qkv = ColumnParallelLinear(*params.merged("qkv"), context, make)
        self._rope = rope
        self._norm = make_qk_norm(spec, params, (num_heads, num_kv_heads), ops, context)
        self._sinks = weights.get(Role.SINKS)
        self._o = RowParallelLinear(*params.merged("o"), context, make)

    def __call__(self, x_TH: torch.Tensor, inputs: LayerInputs, kv: LayerKV) -> torch.Tensor:
        """Returns [T, H], before the residual. `kv`: this layer's cache, to which the step's tokens are added."""
        num_heads, num_kv_heads = self._heads
        qkv_TAD = self._qkv(x_TH).unflatten(-1, (-1, self._head_dim))
        qk_TSD, v_TKD = qkv_TAD.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        weight_SD = None
        if self._norm is not None:
            qk_TSD, weight_SD = self._norm.before(qk_TSD), self._norm.rotate_weight_SD
        angles = None if self._rope is None else inputs.angles[self._rope]
        cos_T1D, sin_T1D = (None, None) if angles is None else (angles.cos_T1D, angles.sin_T1D)
        slots_T = inputs.slots_T[kv.group]
        qk_TSD = self._ops.rotate_store(qk_TSD, v_TKD, weight_SD, self._eps, cos_T1D, sin_T1D, kv, slots_T)
        q_TND, k_TKD = qk_TSD.split((num_heads, num_kv_heads), dim=1)
        out_TND = inputs.attention.attend(q_TND, k_TKD, v_TKD, kv, self._params)
        return self._o(out_TND.flatten(1))

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._qkv, self._o)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._qkv.slots()
        if self._norm is not None:
            yield from self._norm.slots()
        if self._sinks is not None:
            yield ParameterSlot((self._sinks,), self._accept_sinks)
        yield from self._o.slots()

    def _accept_sinks(self, sinks_N: torch.Tensor) -> None:
        self._params = replace(self._params, sinks=tuple(sinks_N.tolist()))


def _own_heads(params: AttentionParams, rows: Span, head_dim: int) -> AttentionParams:
    """Returns the parameters of this rank's query heads. rows: the rank's rows of the q projection."""
    if params.slopes is None:
        return params
    first, count = rows.start // head_dim, rows.length // head_dim
    return replace(params, slopes=params.slopes[first : first + count])
