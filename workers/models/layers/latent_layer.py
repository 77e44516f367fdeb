"""One layer's latent attention (DeepSeek-V2, 2024): a latent for each token, the heads made of it, output projection.

What the cache has of a token is its latent and one key that rotates, the same on every rank; heads are this rank's. T
tokens, H hidden size, N query heads, P elements of a key that do not rotate and R that do, D = P + R, L of a latent,
E = L + R, V of a value.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear, ColumnParallelLinear, RowParallelLinear
from tandem.parallel.linear_methods import DenseMethod, MakeMethod
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.norms import AddNorm, make_norm
from tandem.workers.models.spec.arch import LayerSpec, Mla
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams


class Heads(LatentHeads):
    """The heads of a layer: one dense matrix, of which all products read parts."""

    def __init__(self, spec: Mla, params: LayerParams, context: ParallelContext, make: MakeMethod) -> None:
        self._params, _ = params.merged("kv_b")
        method = make(self._params, context)
        assert isinstance(method, DenseMethod), "a form whose elements cannot be read"
        self._method = method
        super().__init__(spec, method.weight)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._method.slots(self._params, lambda: None)


class LatentAttentionLayer:
    """Latent attention of one layer on this rank. rope: as AttentionLayer has it."""

    def __init__(
        self,
        spec: LayerSpec,
        params: LayerParams,
        context: ParallelContext,
        ops: FusedOps,
        make: MakeMethod,
        rope: int | None = None,
    ) -> None:
        attention = spec.attention
        assert isinstance(attention, Mla)
        norm = replace(spec.norm, eps=attention.norm_eps)
        self._spec = attention
        self._params = spec.params
        self._ops = ops
        self._rope = rope
        self._latents = ColumnParallelLinear(*params.merged("latents"), context, make)
        self._q_norm: AddNorm | None = None
        if attention.q_rank is not None:
            self._q_norm = make_norm(norm, params.norm(Role.Q_A_NORM), ops)
        self._q = ColumnParallelLinear(*params.merged("q"), context, make)
        self._norm = make_norm(norm, params.norm(Role.KV_A_NORM), ops)
        self._heads = Heads(attention, params, context, make)
        self._o = RowParallelLinear(*params.merged("o"), context, make)

    def __call__(self, x_TH: torch.Tensor, inputs: LayerInputs, kv: LayerKV) -> torch.Tensor:
        """Returns [T, H], before the residual. `kv`: this layer's cache, to which the step's tokens are added."""
        spec = self._spec
        q_TX, latents_TL, k_TR = self._latents(x_TH).split((spec.q_rank or 0, spec.kv_rank, spec.rope_dim), dim=-1)
        q_TND = self._q(x_TH if self._q_norm is None else self._q_norm.alone(_in_one_piece(q_TX)))
        q_TND = q_TND.unflatten(-1, (-1, spec.key_dim))
        latents_T1E = _empty_like(k_TR, k_TR.shape[0], 1, spec.head_dim)
        latents_T1E[:, 0, : spec.kv_rank] = self._norm.alone(_in_one_piece(latents_TL))
        self._rotate(q_TND[..., spec.nope_dim :], k_TR[:, None], latents_T1E[..., spec.kv_rank :], inputs)
        self._ops.store(latents_T1E, latents_T1E, kv, inputs.slots_T[kv.group])
        out_TNV = inputs.latent_attention.attend_latent(q_TND, latents_T1E, kv, self._params, self._heads)
        return self._o(out_TNV.flatten(1))

    def _rotate(self, q_TNR: torch.Tensor, k_T1R: torch.Tensor, out_T1R: torch.Tensor, inputs: LayerInputs) -> None:
        """Rotates q in place, and beside it k to `out`."""
        if self._rope is None:
            out_T1R.copy_(k_T1R)
            return
        angles, heads = inputs.angles[self._rope], q_TNR.shape[1]
        qk_TSR = _empty_like(q_TNR, q_TNR.shape[0], heads + 1, q_TNR.shape[2])
        qk_TSR[:, :heads] = q_TNR
        qk_TSR[:, heads:] = k_T1R
        qk_TSR = self._ops.norm_rotate(qk_TSR, None, 0.0, angles.cos_T1D, angles.sin_T1D)
        q_TNR.copy_(qk_TSR[:, :heads])
        out_T1R.copy_(qk_TSR[:, heads:])

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from (self._latents, self._q, self._o)

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._latents.slots()
        if self._q_norm is not None:
            yield from self._q_norm.slots()
        yield from self._q.slots()
        yield from self._norm.slots()
        yield from self._heads.slots()
        yield from self._o.slots()


def _in_one_piece(x_TX: torch.Tensor) -> torch.Tensor:
    """Returns a copy of some columns. Here and above copies are made by operations that a step may be captured with."""
    return _empty_like(x_TX, *x_TX.shape).copy_(x_TX)


def _empty_like(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)
