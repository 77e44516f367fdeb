"""The fused operations of --batch-invariant: the compiled ones, and activations that are computed row by row.

torch computes the last elements of a tensor with other instructions than those before them, and its gelu goes to oneDNN
for some shapes only, so what a row gets there depends on the rows beside it. bf16 and float32, any width, computed in
float32 and rounded once.
"""

import ctypes

import torch

from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel
from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.models.spec.arch import Activation

KINDS = {Activation.SILU: 0, Activation.GELU: 1, Activation.GELU_TANH: 2}
"""As in cpu_activations.c."""


class RowFusedOps(CpuFusedOps):
    """The compiled operations for one element type. library: of cpu_library(); activations: of
    cpu_invariant_library()."""

    def __init__(self, library: ctypes.CDLL, activations: ctypes.CDLL) -> None:
        super().__init__(library)
        self._activate = Kernel(activations, "activate", POINTER, NUMBER, POINTER, NUMBER, NUMBER, COUNT, COUNT)

    def activate(self, x_TM: torch.Tensor, kind: Activation) -> torch.Tensor:
        if kind is Activation.RELU:  # exact
            return super().activate(x_TM, kind)
        assert x_TM.stride(1) == 1
        rows, width = x_TM.shape
        out_TM = torch.empty(rows, width, dtype=x_TM.dtype)
        self._activate(
            x_TM.data_ptr(), x_TM.stride(0), out_TM.data_ptr(), rows, width, KINDS[kind], torch.get_num_threads()
        )
        return out_TM
