"""The small operations between a decoder's matmuls, each as one call: a Protocol and its torch twin.

    add_rms_norm   residual += x; residual / rms(residual) * weight
    norm_rotate    every head of q and k: x / rms(x) * weight, then RoPE: x * cos + swap_halves(x) * sin
    store          cache[slot of token t] = k[t], v[t], as the cache stores them (kv_store.py)
    rotate_store   norm_rotate, then store
    add_layer_norm the same with LayerNorm: (residual - mean) / deviation * weight + bias
    norm_heads     q and k: each head, or all heads of q and all of k, by their mean square, with or without a mean
    silu_mul       silu(gate) * up
    activate       an activation, or activation(gate) * up

Called by workers/models; compiled for CPUs in cpu/cpu_fused_ops.py, for GPUs in triton/triton_fused_ops.py. T tokens, H
hidden size, S heads of q and k, K KV heads, D head dim, M MLP width.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore
from tandem.workers.models.spec.arch import Activation

_ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: partial(F.silu, inplace=True),
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU: partial(F.relu, inplace=True),
}


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

    def add_layer_norm(
        self,
        x_TH: torch.Tensor | None,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor | None,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """Does as add_rms_norm, with LayerNorm, without a weight or a bias where None."""
        ...

    def norm_heads(
        self, qk_TSD: torch.Tensor, weight_SD: torch.Tensor, eps: float, *, together: int | None, centered: bool
    ) -> torch.Tensor:
        """Returns q and k, normed in float32. together: that many first heads are normed as one, and the others as one;
        None: each by itself. centered: by LayerNorm, else by the root of their mean square."""
        ...

    def silu_mul(self, gate_up_TM: torch.Tensor) -> torch.Tensor:
        """Returns [T, M] from rows [gate | up], 2 M wide. May overwrite its input."""
        ...

    def activate(self, x_TM: torch.Tensor, kind: Activation, *, gated: bool) -> torch.Tensor:
        """Returns the activation of rows; gated: as silu_mul. May overwrite its input."""
        ...

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        """Writes the step's K and V to their slots (int64: block id * block size + offset) of one layer's cache."""
        ...

    def rotate_store(
        self,
        qk_TSD: torch.Tensor,
        v_TKD: torch.Tensor,
        weight_SD: torch.Tensor | None,
        eps: float,
        cos_T1D: torch.Tensor | None,
        sin_T1D: torch.Tensor | None,
        kv: LayerKV,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """Returns q and k as norm_rotate does, and stores K, the last heads of them, and V."""
        qk_TSD = self.norm_rotate(qk_TSD, weight_SD, eps, cos_T1D, sin_T1D)
        self.store(qk_TSD[:, -v_TKD.shape[1] :], v_TKD, kv, slots_T)
        return qk_TSD


class TorchFusedOps(FusedOps):
    """The twin: a few torch operations each, on any device."""

    def __init__(self) -> None:
        self._store = TorchKVStore()

    def add_rms_norm(
        self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if x_TH is not None:
            residual_TH.add_(x_TH)
        return F.rms_norm(residual_TH, weight_H.shape, weight_H, eps)

    def add_layer_norm(
        self,
        x_TH: torch.Tensor | None,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor | None,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        if x_TH is not None:
            residual_TH.add_(x_TH)
        return F.layer_norm(residual_TH, residual_TH.shape[-1:], weight_H, bias_H, eps)

    def norm_heads(
        self, qk_TSD: torch.Tensor, weight_SD: torch.Tensor, eps: float, *, together: int | None, centered: bool
    ) -> torch.Tensor:
        heads = qk_TSD.shape[1]
        sizes = [1] * heads if together is None else [together, heads - together]
        norm = F.layer_norm if centered else F.rms_norm
        parts = [part.flatten(1) for part in qk_TSD.float().split(sizes, dim=1)]
        normed_TX = torch.cat([norm(part, part.shape[1:], eps=eps) for part in parts], dim=1)
        return normed_TX.view(qk_TSD.shape).mul_(weight_SD).to(qk_TSD.dtype)

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

    def activate(self, x_TM: torch.Tensor, kind: Activation, *, gated: bool) -> torch.Tensor:
        if not gated:
            return _ACTIVATIONS[kind](x_TM)
        gate_TM, up_TM = x_TM.chunk(2, dim=-1)
        return _ACTIVATIONS[kind](gate_TM) * up_TM

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        self._store.write(k_TKD, v_TKD, kv, slots_T)
