"""One layer's attention block: merged QKV, optional QK norm, rotation, paged attention, output projection.

T tokens, H hidden size, N query heads, K KV heads, S = N + K, D head dim; heads are this rank's.
"""

from collections.abc import Iterator

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear, ColumnParallelLinear, Projection, RowParallelLinear
from tandem.parallel.linear_methods import MakeMatrix
from tandem.parallel.params import ParameterSlot, even_range, kv_head_range
from tandem.workers.attention.backend import AttentionStep
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.layers.norms import QKNorm
from tandem.workers.models.layers.positions import Angles
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.weight_names import WeightNames


class AttentionLayer:
    """Attention of layer `layer` on this rank."""

    def __init__(
        self,
        spec: ArchSpec,
        names: WeightNames,
        layer: int,
        context: ParallelContext,
        ops: FusedOps,
        make: MakeMatrix,
    ) -> None:
        def full(stem: str) -> str:
            return names.of_layer(layer, stem)

        dim = spec.head_dim
        q_start, num_heads = even_range(spec.num_heads, context.tp_rank, context.tp_size)
        kv_start, num_kv_heads = kv_head_range(spec.num_kv_heads, context.tp_rank, context.tp_size)
        projections = [Projection(full(names.q), spec.num_heads * dim, q_start * dim, num_heads * dim)] + [
            Projection(full(stem), spec.num_kv_heads * dim, kv_start * dim, num_kv_heads * dim)
            for stem in (names.k, names.v)
        ]
        self._heads = (num_heads, num_kv_heads)
        self._head_dim = dim
        self._scale = dim**-0.5
        self._eps = spec.norm_eps
        self._ops = ops
        self._window = spec.windows[layer]
        self._rotates = spec.rotary_layers[layer]
        self._qkv = ColumnParallelLinear(spec.hidden_size, projections, spec.qkv_bias, make)
        self._norm = (
            QKNorm(full(names.q_norm), full(names.k_norm), num_heads, num_kv_heads, dim) if spec.qk_norm else None
        )
        self._o = RowParallelLinear(full(names.o), spec.num_heads * dim, spec.hidden_size, spec.o_bias, context, make)

    def __call__(self, x_TH: torch.Tensor, angles: Angles, step: AttentionStep, kv: LayerKV) -> torch.Tensor:
        """Returns [T, H], before the residual. `kv`: this layer's cache, to which the step's tokens are added."""
        num_heads, num_kv_heads = self._heads
        qkv_TAD = self._qkv(x_TH).unflatten(-1, (-1, self._head_dim))
        qk_TSD, v_TKD = qkv_TAD.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        weight_SD = None if self._norm is None else self._norm.weight_SD
        cos_T1D, sin_T1D = (angles.cos_T1D, angles.sin_T1D) if self._rotates else (None, None)
        qk_TSD = self._ops.norm_rotate(qk_TSD, weight_SD, self._eps, cos_T1D, sin_T1D)
        q_TND, k_TKD = qk_TSD.split((num_heads, num_kv_heads), dim=1)
        out_TND = step.forward(q_TND, k_TKD, v_TKD, kv, self._scale, self._window)
        return self._o(out_TND.flatten(1))

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._qkv, self._o)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._qkv.slots()
        if self._norm is not None:
            yield from self._norm.slots()
        yield from self._o.slots()
