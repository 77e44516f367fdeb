"""The router of a mixture of experts: which experts compute a token, and with what weights.

All of it in float32, logits included, on every rank alike. T tokens, E experts, K of them per token, H hidden size.
"""

from collections.abc import Iterator

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.workers.kernels.expert_ops import ExpertOps, RouterWeights
from tandem.workers.models.spec.arch import Moe
from tandem.workers.models.spec.parameter_names import Role
from tandem.workers.models.spec.parameters import LayerParams


class Router:
    """The router of one layer, whole on every rank."""

    def __init__(self, spec: Moe, params: LayerParams, ops: ExpertOps) -> None:
        self._spec = spec
        self._ops = ops
        self._weight_param = params.weights[Role.ROUTER]
        self._bias_param = params.biases.get(Role.ROUTER)
        self._correction_param = params.weights.get(Role.ROUTER_CORRECTION)
        self._weights = RouterWeights(torch.empty(0))

    def __call__(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights [T, K], float32, and indices [T, K], int64, of each token's experts."""
        return self._ops.route(x_TH, self._weights, self._spec)

    def slots(self) -> Iterator[ParameterSlot]:
        yield ParameterSlot((self._weight_param,), self._accept_weight)
        if self._bias_param is not None:
            yield ParameterSlot((self._bias_param,), self._accept_bias)
        if self._correction_param is not None:
            yield ParameterSlot((self._correction_param,), self._accept_correction)

    def _accept_weight(self, weight_EH: torch.Tensor) -> None:
        self._weights = self._weights._replace(weight_EH=weight_EH)

    def _accept_bias(self, bias_E: torch.Tensor) -> None:
        self._weights = self._weights._replace(bias_E=bias_E)

    def _accept_correction(self, correction_E: torch.Tensor) -> None:
        self._weights = self._weights._replace(correction_E=correction_E)
