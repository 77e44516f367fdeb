"""FusedOps compiled for CPUs: one pass over the data each, where torch takes four to eight.

Formulas and layouts as in fused_ops.py, whose TorchFusedOps is the twin and serves widths of partial vectors (a vector
is 16 elements; 32 for rotated heads). bf16 and fp32, computed in fp32, rounded as the twin rounds.
"""

import ctypes

import torch

from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.kv_store import KVStore, LayerKV, TorchKVStore
from tandem.workers.models.spec.arch import Activation

LANES = 16


class CpuFusedOps:
    """The compiled operations for one element type."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._twin = TorchFusedOps()
        self._stores: dict[tuple[torch.dtype, torch.dtype], KVStore] = {}
        self._add_rms_norm = Kernel(
            library, "add_rms_norm", POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER, REAL, COUNT
        )
        self._norm_rotate = Kernel(
            library, "norm_rotate", POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, REAL,
            COUNT,
        )  # fmt: skip
        self._silu_mul = Kernel(library, "silu_mul", POINTER, NUMBER, POINTER, NUMBER, NUMBER, COUNT)

    def add_rms_norm(
        self, x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        tokens, size = residual_TH.shape
        if size % LANES:
            return self._twin.add_rms_norm(x_TH, residual_TH, weight_H, eps)
        assert residual_TH.is_contiguous() and (x_TH is None or x_TH.is_contiguous())
        out_TH = torch.empty_like(residual_TH)
        x = None if x_TH is None else x_TH.data_ptr()
        self._add_rms_norm(
            x, residual_TH.data_ptr(), weight_H.data_ptr(), out_TH.data_ptr(), tokens, size, eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TH

    def norm_rotate(
        self,
        qk_TSD: torch.Tensor,
        weight_SD: torch.Tensor | None,
        eps: float,
        cos_T1D: torch.Tensor | None,
        sin_T1D: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens, heads, dim = qk_TSD.shape
        if dim % (2 * LANES):
            return self._twin.norm_rotate(qk_TSD, weight_SD, eps, cos_T1D, sin_T1D)
        assert qk_TSD.stride()[1:] == (dim, 1)
        out_TSD = torch.empty(qk_TSD.shape, dtype=qk_TSD.dtype)
        weight, cosines, sines = (None if t is None else t.data_ptr() for t in (weight_SD, cos_T1D, sin_T1D))
        self._norm_rotate(
            qk_TSD.data_ptr(), qk_TSD.stride(0), weight, cosines, sines, out_TSD.data_ptr(), tokens, heads, dim, eps,
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TSD

    def silu_mul(self, gate_up_TM: torch.Tensor) -> torch.Tensor:
        tokens, width = gate_up_TM.shape[0], gate_up_TM.shape[1] // 2
        if width % LANES:
            return self._twin.silu_mul(gate_up_TM)
        assert gate_up_TM.stride(1) == 1
        out_TM = torch.empty(tokens, width, dtype=gate_up_TM.dtype)
        self._silu_mul(
            gate_up_TM.data_ptr(), gate_up_TM.stride(0), out_TM.data_ptr(), tokens, width, torch.get_num_threads()
        )
        return out_TM

    def activate(self, x_TM: torch.Tensor, kind: Activation) -> torch.Tensor:
        return self._twin.activate(x_TM, kind)

    def store(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        kind = (k_TKD.dtype, kv.keys.dtype)
        store = self._stores.get(kind)
        if store is None:
            store = self._stores[kind] = CpuKVStore.make(*kind) or TorchKVStore()
        store.write(k_TKD, v_TKD, kv, slots_T)
