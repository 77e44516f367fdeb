"""RMSNorm (Zhang and Sennrich 2019) and its form fused with the residual addition.

T tokens, H hidden size, S heads of q and k, D head dim.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from parallel.shard import Fill, WeightSlot, whole


class RMSNorm:
    """y_TH = x_TH / rms(x_T) * weight_H, computed in float32."""

    def __init__(self, name: str, hidden_size: int, eps: float) -> None:
        self._name = name
        self._hidden_size = hidden_size
        self._eps = eps
        self._weight_H: torch.Tensor | None = None

    def __call__(self, x_TH: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x_TH, (self._hidden_size,), self._weight_H, self._eps)

    def add(self, x_TH: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        """Adds x to the residual, in place, and returns the sum's norm."""
        return self(residual_TH.add_(x_TH))

    def slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot(whole(f"{self._name}.weight", self._hidden_size, fill=Fill.ONES), self._accept)

    def _accept(self, weight_H: torch.Tensor) -> None:
        self._weight_H = weight_H


class QKNorm:
    """RMSNorm of every query and key head over its head dim (Dehghani et al. 2023), q and k in one call."""

    def __init__(self, q_name: str, k_name: str, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        self._names = (q_name, k_name)
        self._repeats = (num_heads, num_kv_heads)
        self._head_dim = head_dim
        self._eps = eps
        self._rows: list[torch.Tensor] = []
        self._weight_SD: torch.Tensor | None = None

    def __call__(self, qk_TSD: torch.Tensor) -> torch.Tensor:
        """S = query heads, then KV heads. A new tensor."""
        return F.rms_norm(qk_TSD, (self._head_dim,), None, self._eps).mul_(self._weight_SD)

    def slots(self) -> Iterator[WeightSlot]:
        for name in self._names:
            yield WeightSlot(whole(f"{name}.weight", self._head_dim, fill=Fill.ONES), self._accept)

    def _accept(self, weight_D: torch.Tensor) -> None:
        """q's weight comes first; both spread to one row per head."""
        repeats = self._repeats[len(self._rows)]
        self._rows.append(weight_D.expand(repeats, -1))
        if len(self._rows) == len(self._names):
            self._weight_SD = torch.cat(self._rows)
