"""RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), and their forms behind a residual addition.

T tokens, H hidden size, S = query heads, then KV heads, D head dim.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.params import Param
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
        yield ParameterSlot((self._params.weight,), self._accept)

    def _accept(self, weight_H: torch.Tensor) -> None:
        self._weight_H = weight_H


class LayerNorm:
    """y_TH = (x_TH - mean(x_T)) / deviation(x_T) * weight_H + bias_H."""

    def __init__(self, params: NormParams, eps: float) -> None:
        assert params.bias is not None, "a LayerNorm without a bias"
        self._params = (params.weight, params.bias)
        self._eps = eps
        self._values: list[torch.Tensor] = []

    def __call__(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        if x_TH is not None:
            residual_TH.add_(x_TH)
        return self.alone(residual_TH)

    def alone(self, x_TH: torch.Tensor) -> torch.Tensor:
        weight_H, bias_H = self._values
        return F.layer_norm(x_TH, weight_H.shape, weight_H, bias_H, self._eps)

    def slots(self) -> Iterator[ParameterSlot]:
        for param in self._params:
            yield ParameterSlot((param,), self._values.append)


def make_norm(spec: Norm, params: NormParams, ops: FusedOps) -> AddNorm:
    """Returns the norm that a spec describes."""
    return RMSNorm(params, spec.eps, ops) if spec.kind is NormKind.RMS else LayerNorm(params, spec.eps)


class QKNorm:
    """The weights of RMSNorm over every query and key head (Dehghani et al. 2023), one row per head, q and k in one."""

    def __init__(self, q: Param, k: Param, num_heads: int, num_kv_heads: int) -> None:
        self._params = (q, k)
        self._repeats = (num_heads, num_kv_heads)
        self._rows: list[torch.Tensor] = []
        self.weight_SD: torch.Tensor | None = None

    def slots(self) -> Iterator[ParameterSlot]:
        for param in self._params:
            yield ParameterSlot((param,), self._accept)

    def _accept(self, weight_D: torch.Tensor) -> None:
        """Takes q's weight first, then k's; each is expanded to one row per head."""
        repeats = self._repeats[len(self._rows)]
        self._rows.append(weight_D.expand(repeats, -1))
        if len(self._rows) == len(self._params):
            self.weight_SD = torch.cat(self._rows)
