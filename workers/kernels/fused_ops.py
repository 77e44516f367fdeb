"""The small operations between a decoder's matmuls, each as one call: a Protocol and its torch twin.

    add_rms_norm   residual += x; residual / rms(residual) * weight
    norm_rotate    every head of q and k: x / rms(x) * weight, then RoPE: x * cos + swap_halves(x) * sin
    silu_mul       silu(gate) * up
    activate       silu(x), gelu(x) or relu(x)
    store          cache[slot of token t] = k[t], v[t], as the cache stores them (kv_store.py)

Called by workers/models. T tokens, H hidden size, S heads of q and k, K KV heads, D head dim, M MLP width.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore
from tandem.workers.models.spec.arch import Activation


class FusedOps(Protocol):
    """An implementation of the operations for the decoder's device and dtype."""

    def add_rms_norm(
        self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds x, if given, to the residual in place; returns the norm of the sum, a new tensor."""
        ...

    def norm_rotate(
        self,
        qk_TSD: torch.Tensor,
        weight_SD: torch.Tensor | None,
        eps: float,
        cos_T1D: torch.Tensor | None,
        sin_T1D: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns q and k, normed if there is a weight and rotated if there are angles; may return its input if there
        is neither.

        sin_T1D has rotate-half's sign folded in: -sin in the first half, +sin in the second.
        """
        ...

    def silu_mul(self, gate_up_TM: torch.Tensor) -> torch.Tensor:
        """Returns [T, M] from rows [gate | up], 2 M wide. May overwrite its input."""
        ...

    def activate(self, x_TM: torch.Tensor, kind: Activation) -> torch.Tensor:
        """Returns the activation of each element. May overwrite its input."""
        ...

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        """Writes the step's K and V to their slots (int64: block id * block size + offset) of one layer's cache."""
        ...


class TorchFusedOps:
    """The twin: a few torch operations each, on any device."""

    def __init__(self) -> None:
        self._store = TorchKVStore()

    def add_rms_norm(
        self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if x_TH is not None:
            residual_TH.add_(x_TH)
        return F.rms_norm(residual_TH, weight_H.shape, weight_H, eps)

    def norm_rotate(
        self,
        qk_TSD: torch.Tensor,
        weight_SD: torch.Tensor | None,
        eps: float,
        cos_T1D: torch.Tensor | None,
        sin_T1D: torch.Tensor | None,
    ) -> torch.Tensor:
        if weight_SD is not None:
            qk_TSD = F.rms_norm(qk_TSD, qk_TSD.shape[-1:], None, eps).mul_(weight_SD)
        if cos_T1D is None or sin_T1D is None:
            return qk_TSD
        half = qk_TSD.shape[-1] // 2
        swapped_TSD = torch.cat((qk_TSD[..., half:], qk_TSD[..., :half]), dim=-1)
        return (qk_TSD * cos_T1D).addcmul_(swapped_TSD, sin_T1D)

    def silu_mul(self, gate_up_TM: torch.Tensor) -> torch.Tensor:
        gate_TM, up_TM = gate_up_TM.chunk(2, dim=-1)
        return F.silu(gate_TM, inplace=True) * up_TM

    def activate(self, x_TM: torch.Tensor, kind: Activation) -> torch.Tensor:
        if kind is Activation.SILU:
            return F.silu(x_TM, inplace=True)
        if kind is Activation.RELU:
            return F.relu(x_TM, inplace=True)
        return F.gelu(x_TM, approximate="tanh" if kind is Activation.GELU_TANH else "none")

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        self._store.write(k_TKD, v_TKD, kv, slots_T)
