"""One layer of the decoder, sharded over tp. Built and run by decoder.py. T tokens, H hidden size."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear import AdaptableLinear
from tandem.parallel.linear_methods import MakeMethod
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.layers.attention_layer import AttentionLayer
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.layers.mlp import MLP
from tandem.workers.models.layers.norms import AddNorm, NoNorm, make_norm
from tandem.workers.models.spec.arch import LayerSpec, Mla, Moe
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import NORMS_OF, LayerParams

if TYPE_CHECKING:  # a layer imports the kinds of attention and MLP that it has
    from tandem.workers.kernels.expert_ops import ExpertOps
    from tandem.workers.models.layers.latent_layer import LatentAttentionLayer
    from tandem.workers.models.layers.moe import MixtureOfExperts

MakeExperts = Callable[[], "ExpertOps"]  # called where a layer has experts


class DecoderLayer:
    """Attention and MLP with their norms, each added to the residual stream. rope: see AttentionLayer."""

    def __init__(
        self,
        spec: LayerSpec,
        params: LayerParams,
        context: ParallelContext,
        ops: FusedOps,
        make: MakeMethod,
        experts: MakeExperts,
        rope: int | None = None,
    ) -> None:
        def norm(role: Role) -> AddNorm:
            return make_norm(spec.norm if role in norms else None, params.norm(role), ops)

        norms = NORMS_OF[spec.place]
        self._attention_norm, self._mlp_norm = norm(Role.ATTENTION_NORM), norm(Role.MLP_NORM)
        attention = _latent_layer() if isinstance(spec.attention, Mla) else AttentionLayer
        self._attention = attention(spec, params, context, ops, make, rope)
        self._mlp: MLP | MixtureOfExperts
        if isinstance(spec.mlp, Moe):
            self._mlp = _mixture()(spec.mlp, params, context, ops, make, experts())
        else:
            self._mlp = MLP(spec.mlp, params, context, ops, make)
        self._post_norms: tuple[AddNorm, AddNorm] | None = None
        if Role.ATTENTION_POST_NORM in norms:
            self._post_norms = norm(Role.ATTENTION_POST_NORM), norm(Role.MLP_POST_NORM)

    def leave_out_norm(self) -> None:
        """Has no norm before attention, as the first layer of some heads."""
        self._attention_norm = NoNorm()

    def __call__(
        self,
        branch_TH: torch.Tensor | None,
        inputs: LayerInputs,
        kv: LayerKV,
    ) -> torch.Tensor:
        """Adds the previous layer's MLP output (`branch`, None at a stage's start) and its own attention to the
        residual, in place; returns its own MLP output for the next layer to add, fused with that layer's norm. kv: this
        layer's cache."""
        residual_TH = inputs.residual_TH
        x_TH = self._attention(self._attention_norm(branch_TH, residual_TH), inputs, kv)
        if self._post_norms is None:
            return self._feed(self._mlp_norm(x_TH, residual_TH), inputs)
        behind_attention, behind_mlp = self._post_norms
        return behind_mlp.alone(self._feed(self._mlp_norm(behind_attention.alone(x_TH), residual_TH), inputs))

    def _feed(self, x_TH: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """Returns the MLP's output, [T, H]. Experts get no padding."""
        return self._mlp(x_TH) if isinstance(self._mlp, MLP) else self._mlp(x_TH, inputs.batch.real_T)

    @property
    def expert_loads_E(self) -> torch.Tensor | None:
        """Tokens that each of its experts has got; None without experts."""
        return None if isinstance(self._mlp, MLP) else self._mlp.loads_E

    def linears(self) -> Iterator[AdaptableLinear]:
        yield from self._attention.linears()
        yield from self._mlp.linears()

    def slots(self) -> Iterator[ParameterSlot]:
        yield from self._attention_norm.slots()
        yield from self._attention.slots()
        yield from self._mlp_norm.slots()
        yield from self._mlp.slots()
        for norm in self._post_norms or ():
            yield from norm.slots()


def _latent_layer() -> "type[LatentAttentionLayer]":
    from tandem.workers.models.layers.latent_layer import LatentAttentionLayer

    return LatentAttentionLayer


def _mixture() -> "type[MixtureOfExperts]":
    from tandem.workers.models.layers.moe import MixtureOfExperts

    return MixtureOfExperts
