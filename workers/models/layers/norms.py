"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), and their forms behind a residual addition.

T tokens, H hidden size. Norms of q and k are in qk_norms.py.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.models.spec.arch import Norm, NormKind
from tandem.workers.models.spec.parameters import NormParams


class AddNorm(Protocol):
    """A norm of the residual stream."""

    def __call__(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        """Adds x, where given, to the residual in place, and returns the sum's norm."""
        ...

    def alone(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Returns the norm of x, a new tensor."""
        ...

    def slots(self) -> Iterator[ParameterSlot]: ...


class RMSNorm:
    """y_TH = x_TH / rms(x_T) * weight_H, computed in float32."""

    def __init__(self, params: NormParams, eps: float, ops: FusedOps) -> None:
        self._params = params
        self._eps = eps
        self._ops = ops
        self._weight_H: torch.Tensor | None = None

    def __call__(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        assert self._weight_H is not None, "not loaded"
        return self._ops.add_rms_norm(x_TH, residual_TH, self._weight_H, self._eps)

    def alone(self, x_TH: torch.Tensor) -> torch.Tensor:
        assert self._weight_H is not None, "not loaded"
        return self._ops.add_rms_norm(None, x_TH, self._weight_H, self._eps)

    def slots(self) -> Iterator[ParameterSlot]:
        assert self._params.weight is not None, "an RMSNorm without a weight"
        yield ParameterSlot((self._params.weight,), self._accept)

    def _accept(self, weight_H: torch.Tensor) -> None:
        self._weight_H = weight_H


class LayerNorm:
    """y_TH = (x_TH - mean(x_T)) / deviation(x_T) * weight_H + bias_H, without either where the model has none."""

    def __init__(self, params: NormParams, eps: float, ops: FusedOps) -> None:
        self._params = params
        self._eps = eps
        self._ops = ops
        self._weight_H: torch.Tensor | None = None
        self._bias_H: torch.Tensor | None = None

    def __call__(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        return self._ops.add_layer_norm(x_TH, residual_TH, self._weight_H, self._bias_H, self._eps)

    def alone(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self._ops.add_layer_norm(None, x_TH, self._weight_H, self._bias_H, self._eps)

    def slots(self) -> Iterator[ParameterSlot]:
        if self._params.weight is not None:
            yield ParameterSlot((self._params.weight,), self._accept_weight)
        if self._params.bias is not None:
            yield ParameterSlot((self._params.bias,), self._accept_bias)

    def _accept_weight(self, weight_H: torch.Tensor) -> None:
        self._weight_H = weight_H

    def _accept_bias(self, bias_H: torch.Tensor) -> None:
        self._bias_H = bias_H


class NoNorm:
    """The residual stream as it is, of models without a norm behind their layers."""

    def __call__(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        return residual_TH.clone() if x_TH is None else residual_TH.add_(x_TH).clone()

    def alone(self, x_TH: torch.Tensor) -> torch.Tensor:
        return x_TH.clone()

    def slots(self) -> Iterator[ParameterSlot]:
        yield from ()


def make_norm(spec: Norm | None, params: NormParams, ops: FusedOps) -> AddNorm:
    """Returns the norm that a spec describes."""
    if spec is None:
        return NoNorm()
    return (RMSNorm if spec.kind is NormKind.RMS else LayerNorm)(params, spec.eps, ops)
