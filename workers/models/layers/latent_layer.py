"""One layer's latent attention (DeepSeek-V2, 2024): a latent for each token, the heads made of it, output projection.

What the cache has of a token is its latent and one key that rotates, the same on every rank; heads are this rank's. T
tokens, H hidden size, N query heads, P elements of a key that do not rotate and R that do, D = P + R, L of a latent,
E = L + R, V of a value.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear, ColumnParallelLinear, RowParallelLinear
from tandem.parallel.linear_methods import DenseMethod, MakeMethod
from tandem.workers.attention.latent import LatentStep
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.norms import AddNorm, make_norm
from tandem.workers.models.spec.arch import LayerSpec, Mla
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams


class Heads:
    """The LatentHeads of a layer: one dense matrix, of which all products read parts."""

    def __init__(self, spec: Mla, params: LayerParams, context: ParallelContext, make: MakeMethod) -> None:
        self.spec = spec
        self._params, _ = params.merged("kv_b")
        method = make(self._params, context)
        assert isinstance(method, DenseMethod), "a form whose elements cannot be read"
        self._method = method

    def absorb(self, q_TND: torch.Tensor) -> torch.Tensor:
        nope = self.spec.nope_dim
        q_TNL = (q_TND[..., :nope].transpose(0, 1) @ self._of_heads()[:, :nope]).transpose(0, 1)
        return torch.cat((q_TNL, q_TND[..., nope:]), dim=-1)

    def release(self, out_TNL: torch.Tensor) -> torch.Tensor:
        of_values_NLV = self._of_heads()[:, self.spec.nope_dim :].transpose(1, 2)
        return (out_TNL.transpose(0, 1) @ of_values_NLV).transpose(0, 1)

    def expand(self, latents_JE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spec = self.spec
        latents_JL, turned_JR = latents_JE.split((spec.kv_rank, spec.rope_dim), dim=-1)
        kv_JNX = F.linear(latents_JL, self._method.weight()).unflatten(-1, (-1, spec.nope_dim + spec.v_dim))
        k_JNP, v_JNV = kv_JNX.split((spec.nope_dim, spec.v_dim), dim=-1)
        turned_JNR = turned_JR[:, None].expand(-1, k_JNP.shape[1], -1)
        return torch.cat((k_JNP, turned_JNR), dim=-1), v_JNV

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._method.slots(self._params, lambda: None)

    def _of_heads(self) -> torch.Tensor:
        """Returns the matrix as [N, P + V, L]."""
        return self._method.weight().unflatten(0, (-1, self.spec.nope_dim + self.spec.v_dim))


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
        spec, step = self._spec, inputs.attention
        assert isinstance(step, LatentStep), "an attention backend without latents"
        q_TX, latents_TL, k_TR = self._latents(x_TH).split((spec.q_rank or 0, spec.kv_rank, spec.rope_dim), dim=-1)
        q_TND = self._q(x_TH if self._q_norm is None else self._q_norm.alone(q_TX.contiguous()))
        q_TND = q_TND.unflatten(-1, (-1, spec.key_dim))
        q_TND, k_T1R = self._rotated(q_TND, k_TR[:, None], inputs)
        latents_T1E = torch.cat((self._norm.alone(latents_TL.contiguous())[:, None], k_T1R), dim=-1)
        self._ops.store(latents_T1E, latents_T1E, kv, inputs.slots_T[kv.group])
        out_TNV = step.attend_latent(q_TND, latents_T1E, kv, self._params, self._heads)
        return self._o(out_TNV.flatten(1))

    def _rotated(
        self, q_TND: torch.Tensor, k_T1R: torch.Tensor, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both with their last R elements rotated, as new tensors."""
        if self._rope is None:
            return q_TND, k_T1R
        angles = inputs.angles[self._rope]
        q_TNP, q_TNR = q_TND.split((self._spec.nope_dim, self._spec.rope_dim), dim=-1)
        qk_TSR = torch.cat((q_TNR, k_T1R), dim=1)
        qk_TSR = self._ops.norm_rotate(qk_TSR, None, 0.0, angles.cos_T1D, angles.sin_T1D)
        return torch.cat((q_TNP, qk_TSR[:, :-1]), dim=-1), qk_TSR[:, -1:]

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
