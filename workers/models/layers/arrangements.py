"""Layers whose norms and sums stand otherwise than in Llama's, and the choice among all of them.

Built by decoder.py. T tokens, H hidden size.
"""

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import MakeMethod
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.layers.decoder_layer import DecoderLayer, MakeExperts
from tandem.workers.models.layers.layer_inputs import LayerInputs
from tandem.workers.models.spec.arch import LayerSpec, NormPlace
from tandem.workers.models.spec.parameters import LayerParams


class ScaledLayer(DecoderLayer):
    """Attention and MLP are multiplied by a number before they are added."""

    scale = 1.0

    def __call__(
        self,
        branch_TH: torch.Tensor | None,
        inputs: LayerInputs,
        kv: LayerKV,
    ) -> torch.Tensor:
        residual_TH = inputs.residual_TH
        x_TH = self._attention(self._attention_norm(branch_TH, residual_TH), inputs, kv).mul_(self.scale)
        return self._feed(self._mlp_norm(x_TH, residual_TH), inputs).mul_(self.scale)


class PostNormLayer(DecoderLayer):
    """Norms behind attention and MLP, none before them."""

    def __call__(
        self,
        branch_TH: torch.Tensor | None,
        inputs: LayerInputs,
        kv: LayerKV,
    ) -> torch.Tensor:
        residual_TH = inputs.residual_TH
        assert self._post_norms is not None
        behind_attention, behind_mlp = self._post_norms
        if branch_TH is not None:
            residual_TH.add_(branch_TH)
        residual_TH.add_(behind_attention.alone(self._attention(residual_TH, inputs, kv)))
        return behind_mlp.alone(self._feed(residual_TH, inputs))


class PostSumLayer(DecoderLayer):
    """Norms of the sums. What it returns is the whole stream, and the residual is zero."""

    def __call__(
        self,
        branch_TH: torch.Tensor | None,
        inputs: LayerInputs,
        kv: LayerKV,
    ) -> torch.Tensor:
        residual_TH = inputs.residual_TH
        if branch_TH is not None:
            residual_TH.add_(branch_TH)
        middle_TH = self._attention_norm(self._attention(residual_TH, inputs, kv), residual_TH)
        stream_TH = self._mlp_norm(self._feed(middle_TH, inputs), middle_TH)
        residual_TH.zero_()
        return stream_TH


class ParallelLayer(DecoderLayer):
    """Attention and MLP of the same input, each behind its own norm or both behind one (Wang and Komatsuzaki 2021)."""

    has_two_norms = False

    def __call__(
        self,
        branch_TH: torch.Tensor | None,
        inputs: LayerInputs,
        kv: LayerKV,
    ) -> torch.Tensor:
        residual_TH = inputs.residual_TH
        normed_TH = self._attention_norm(branch_TH, residual_TH)
        x_TH = self._attention(normed_TH, inputs, kv)
        return x_TH.add_(self._feed(self._mlp_norm.alone(residual_TH) if self.has_two_norms else normed_TH, inputs))


class ParallelTwoNormsLayer(ParallelLayer):
    """Each behind its own norm."""

    has_two_norms = True


ARRANGEMENTS: dict[NormPlace, type[DecoderLayer]] = {
    NormPlace.PRE: DecoderLayer,
    NormPlace.SANDWICH: DecoderLayer,
    NormPlace.POST: PostNormLayer,
    NormPlace.POST_SUM: PostSumLayer,
    NormPlace.PARALLEL: ParallelLayer,
    NormPlace.PARALLEL_TWO: ParallelTwoNormsLayer,
}


def make_layer(
    spec: LayerSpec,
    params: LayerParams,
    context: ParallelContext,
    ops: FusedOps,
    make: MakeMethod,
    experts: MakeExperts,
    rope: int | None = None,
) -> DecoderLayer:
    """Returns the layer that a spec describes. experts, rope: see DecoderLayer."""
    if spec.branch_scale == 1.0:
        return ARRANGEMENTS[spec.place](spec, params, context, ops, make, experts, rope)
    assert spec.place is NormPlace.PRE, "scaled branches elsewhere than behind norms"
    layer = ScaledLayer(spec, params, context, ops, make, experts, rope)
    layer.scale = spec.branch_scale
    return layer
