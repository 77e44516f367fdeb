"""Norms of q and k (Dehghani et al. 2023): of each head, or of all heads at once.

A root mean square of each head is computed with the rotation (FusedOps.rotate_store), the others before it. T tokens,
S = query heads, then KV heads, D head dim; heads are this rank's.
"""

from collections.abc import Iterator

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.params import Param
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.models.spec.arch import Gqa, LayerSpec, NormKind, QkNorm
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams


class QKNorm:
    """RMSNorm of every query and key head: its weights, one row per head, q and k in one."""

    def __init__(self, q: Param, k: Param, heads: tuple[int, int], head_dim: int) -> None:
        self._params = (q, k)
        self._heads = heads
        self._head_dim = head_dim
        self._rows: list[torch.Tensor] = []
        self.weight_SD: torch.Tensor | None = None

    def before(self, qk_TSD: torch.Tensor) -> torch.Tensor:
        """Returns q and k as rotate_store gets them."""
        return qk_TSD

    @property
    def rotate_weight_SD(self) -> torch.Tensor | None:
        """The weight that rotate_store norms by, None for none."""
        return self.weight_SD

    def slots(self) -> Iterator[ParameterSlot]:
        for param in self._params:
            yield ParameterSlot((param,), self._accept)

    def _accept(self, weight: torch.Tensor) -> None:
        """Takes q's weight first, then k's: [D] for all heads, or each head's one behind another."""
        self._rows.append(weight.unflatten(0, (-1, self._head_dim)).expand(self._heads[len(self._rows)], -1))
        if len(self._rows) == len(self._params):
            self.weight_SD = torch.cat(self._rows)


class LayerQKNorm(QKNorm):
    """LayerNorm of every query and key head, without a bias."""

    def __init__(self, q: Param, k: Param, heads: tuple[int, int], head_dim: int, eps: float, ops: FusedOps) -> None:
        super().__init__(q, k, heads, head_dim)
        self._eps = eps
        self._ops = ops

    def before(self, qk_TSD: torch.Tensor) -> torch.Tensor:
        assert self.weight_SD is not None, "not loaded"
        return self._ops.norm_heads(qk_TSD, self.weight_SD, self._eps, together=None, centered=True)

    @property
    def rotate_weight_SD(self) -> torch.Tensor | None:
        return None


class WholeQKNorm(QKNorm):
    """RMSNorm over all query heads, and over all key heads; ranks add up the squares of theirs."""

    def __init__(
        self,
        q: Param,
        k: Param,
        heads: tuple[int, int],
        head_dim: int,
        eps: float,
        ops: FusedOps,
        context: ParallelContext,
    ) -> None:
        super().__init__(q, k, heads, head_dim)
        self._eps = eps
        self._ops = ops
        self._context = context
        ranks = context.tp_size
        copies = [count * head_dim * ranks // param.num_elements for count, param in zip(heads, (q, k), strict=True)]
        self._totals = [param.num_elements * times for param, times in zip((q, k), copies, strict=True)]

    def before(self, qk_TSD: torch.Tensor) -> torch.Tensor:
        assert self.weight_SD is not None, "not loaded"
        if self._context.tp_size == 1:
            return self._ops.norm_heads(qk_TSD, self.weight_SD, self._eps, together=self._heads[0], centered=False)
        parts = qk_TSD.float().split(self._heads, dim=1)
        squares_T2 = torch.stack([part.square().sum((1, 2)) for part in parts], dim=1)
        squares_T2 = self._context.tp.all_reduce(squares_T2)
        scales = [
            torch.rsqrt(squares_T2[:, place] / total + self._eps)[:, None, None]
            for place, total in enumerate(self._totals)
        ]
        normed_TSD = torch.cat([part * scale for part, scale in zip(parts, scales, strict=True)], dim=1)
        return normed_TSD.mul_(self.weight_SD).to(qk_TSD.dtype)

    @property
    def rotate_weight_SD(self) -> torch.Tensor | None:
        return None


def make_qk_norm(
    spec: LayerSpec, params: LayerParams, heads: tuple[int, int], ops: FusedOps, context: ParallelContext
) -> QKNorm | None:
    """Returns the norm that a layer has; None for none. heads: this rank's query and KV heads."""
    attention = spec.attention
    assert isinstance(attention, Gqa), "a norm of heads that latents have none of"
    kind, dim = attention.qk_norm, attention.head_dim
    if kind is None:
        return None
    q, k = params.weights[Role.Q_NORM], params.weights[Role.K_NORM]
    if kind is QkNorm.WHOLE:
        assert spec.norm.kind is NormKind.RMS, "a LayerNorm over all heads"
        return WholeQKNorm(q, k, heads, dim, spec.norm.eps, ops, context)
    if spec.norm.kind is NormKind.RMS:
        return QKNorm(q, k, heads, dim)
    return LayerQKNorm(q, k, heads, dim, spec.norm.eps, ops)
