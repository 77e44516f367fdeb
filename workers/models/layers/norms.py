"""RMSNorm (Zhang and Sennrich 2019) and its form fused with the residual addition.

T tokens, H hidden size, S = query heads, then KV heads, D head dim.
"""

from collections.abc import Iterator

import torch

from tandem.parallel.checkpoint import ParameterSlot
from tandem.parallel.params import Param
from tandem.workers.kernels.fused_ops import FusedOps


class RMSNorm:
    """y_TH = x_TH / rms(x_T) * weight_H, computed in float32."""

    def __init__(self, param: Param, eps: float, ops: FusedOps) -> None:
        self._param = param
        self._eps = eps
        self._ops = ops
        self._weight_H: torch.Tensor | None = None

    def __call__(self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor) -> torch.Tensor:
        """Adds x, where given, to the residual in place, and returns the sum's norm."""
        assert self._weight_H is not None, "not loaded"
        return self._ops.add_rms_norm(x_TH, residual_TH, self._weight_H, self._eps)

    def slots(self) -> Iterator[ParameterSlot]:
        yield ParameterSlot((self._param,), self._accept)

    def _accept(self, weight_H: torch.Tensor) -> None:
        self._weight_H = weight_H


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
