"""FusedOps compiled for CPUs: one pass over the data each, where torch takes four to eight.

Formulas and layouts as in fused_ops.py, whose TorchFusedOps is the twin. bf16 and fp32, computed in fp32, rounded as
the twin rounds.
"""

import ctypes
from collections.abc import Mapping

import torch

from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.fused_ops import FusedOps
from tandem.workers.kernels.kv_store import KVStore, LayerKV, TorchKVStore
from tandem.workers.models.spec.arch import Activation

KINDS: Mapping[Activation, int] = {
    Activation.SILU: 0,
    Activation.GELU: 1,
    Activation.GELU_TANH: 2,
    Activation.RELU: 3,
}
"""The kernel's numbers of activations."""


class CpuFusedOps(FusedOps):
    """The compiled operations for one element type."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._stores: dict[tuple[torch.dtype, torch.dtype], KVStore] = {}
        self._add_rms_norm = Kernel(
            library, "add_rms_norm", POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER, REAL, COUNT
        )
        self._norm_rotate = Kernel(
            library, "norm_rotate", POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, REAL,
            COUNT,
        )  # fmt: skip
        self._add_layer_norm = Kernel(
            library, "add_layer_norm", POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER, REAL, COUNT
        )
        self._norm_heads = Kernel(
            library, "norm_heads", POINTER, NUMBER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, NUMBER, COUNT, REAL, COUNT
        )
        self._activate = Kernel(library, "activate", POINTER, NUMBER, POINTER, NUMBER, NUMBER, COUNT, COUNT, COUNT)
        self._silu_mul = Kernel(library, "silu_mul", POINTER, NUMBER, POINTER, NUMBER, NUMBER, COUNT)

    def add_rms_norm(
        self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        tokens, size = residual_TH.shape
        assert residual_TH.is_contiguous() and (x_TH is None or x_TH.is_contiguous())
        out_TH = torch.empty_like(residual_TH)
        self._add_rms_norm(
            _address(x_TH), residual_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(), tokens, size, eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TH

    def add_layer_norm(
        self,
        x_TH: torch.Tensor | None,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor | None,
        bias_H: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        tokens, size = residual_TH.shape
        assert residual_TH.is_contiguous() and (x_TH is None or x_TH.is_contiguous())
        out_TH = torch.empty_like(residual_TH)
        self._add_layer_norm(
            _address(x_TH), residual_TH.data_ptr(), _address(weight_H), _address(bias_H), out_TH.data_ptr(), tokens,
            size, eps, torch.get_num_threads(),
        )  # fmt: skip
        return out_TH

    def norm_heads(
        self, qk_TSD: torch.Tensor, weight_SD: torch.Tensor, eps: float, *, together: int | None, centered: bool
    ) -> torch.Tensor:
        tokens, heads, dim = qk_TSD.shape
        assert qk_TSD.stride()[1:] == (dim, 1) and weight_SD.is_contiguous()
        out_TSD = torch.empty(qk_TSD.shape, dtype=qk_TSD.dtype)
        self._norm_heads(
            qk_TSD.data_ptr(), qk_TSD.stride(0), weight_SD.data_ptr(), out_TSD.data_ptr(), tokens, heads, dim,
            together or 0, centered, eps, torch.get_num_threads(),
        )  # fmt: skip
        return out_TSD

    def norm_rotate(
        self,
        qk_TSD: torch.Tensor,
        weight_SD: torch.Tensor | None,
        eps: float,
        cos_T1D: torch.Tensor | None,
        sin_T1D: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens, heads, dim = qk_TSD.shape
        assert qk_TSD.stride()[1:] == (dim, 1)
        out_TSD = torch.empty(qk_TSD.shape, dtype=qk_TSD.dtype)
        weight, cosines, sines = (_address(t) for t in (weight_SD, cos_T1D, sin_T1D))
        self._norm_rotate(
            qk_TSD.data_ptr(), qk_TSD.stride(0), weight, cosines, sines, out_TSD.data_ptr(), tokens, heads, dim, eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TSD

    def silu_mul(self, gate_up_TM: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up_TM.shape[0], gate_up_TM.shape[1] // 2
        assert gate_up_TM.stride(1) == 1
        out_TM = torch.empty(tokens, width, dtype=gate_up_TM.dtype)
        self._silu_mul(
            gate_up_TM.data_ptr(), gate_up_TM.stride(0), out_TM.data_ptr(), tokens, width, torch.get_num_threads()
        )
        return out_TM

    def activate(self, x_TM: torch.Tensor, kind: Activation, *, gated: bool) -> torch.Tensor:
        assert x_TM.stride(1) == 1
        tokens, width = x_TM.shape[0], x_TM.shape[1] // (2 if gated else 1)
        out_TM = torch.empty(tokens, width, dtype=x_TM.dtype)
        self._activate(
            x_TM.data_ptr(), x_TM.stride(0), out_TM.data_ptr(), tokens, width, KINDS[kind], gated,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TM

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        kind = (k_TKD.dtype, kv.keys.dtype)
        store = self._stores.get(kind)
        if store is None:
            store = self._stores[kind] = CpuKVStore.make(*kind) or TorchKVStore()
        store.write(k_TKD, v_TKD, kv, slots_T)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
