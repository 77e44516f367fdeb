"""Products whose rows do not depend on each other, for any number of rows, inputs and outputs.

    y[t, o] = b[o] + sum_i x[t, i] W[o, i],  summed in float32, in runs of 128 inputs, in order

--batch-invariant needs them, as oneDNN splits a sum otherwise for other numbers of rows. x86 CPUs that have AVX2 and
multiply no pairs of bf16 use them for all bf16 weights, as oneDNN takes longer there. bf16 and float32. More than FEW
rows are widened to float32 first, and of prompts each run of weights, once for 16 tiles of rows; a row's bits are the
same in all of these ways. Where the skinny GEMM multiplies a weight (kernels/cpu/cpu_skinny_gemm.py) it does so here
too, for all rows, 64 at a time, since its rows are independent.
A reduction that is the same for all batch sizes is the idea of Thinking Machines' "Defeating Nondeterminism in LLM
Inference" (2025). T rows, I inputs, O outputs.

The layout: blocks of 64 outputs, [O / 64][I][64], padded with zeros.
"""

import ctypes
import threading
from collections.abc import Sequence

import torch

from tandem.configs.errors import SettingsError
from tandem.parallel.context import ParallelContext
from tandem.parallel.linear_methods import Arrive, DenseMethod, LinearMethod, MakeMethod, PackedMethod, Place, as_given
from tandem.parallel.params import Param
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel, Scratch
from tandem.workers.kernels.cpu.cpu_skinny_gemm import DEPTH, CpuSkinnyGemm
from tandem.workers.kernels.cpu.weight_blocks import BLOCK, in_blocks
from tandem.workers.kernels.huge_pages import WEIGHTS

FEW = 6
"""Rows that are multiplied as they are."""
LANES = 16
WIDE_FLOATS, LEAST_WIDE_ROWS = 2**22, 256
"""Inputs that are widened to float32 at a time: 16 MiB, or as many rows as share a piece of the weight well."""


class _WideInputs(threading.local):
    """This thread's widened inputs."""

    def __init__(self) -> None:
        self.wide = Scratch()


_here = _WideInputs()


class RowMethod(LinearMethod):
    """A weight in the kernel's layout."""

    is_copy = True

    def __init__(self, kernel: Kernel, place: Place = as_given) -> None:
        self._kernel = kernel
        self._place = place
        self._packed: torch.Tensor | None = None
        self._bias_O: torch.Tensor | None = None
        self._arrive: Arrive | None = None
        self._shape = (0, 0)
        self.nbytes = 0

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        _, inputs = self._shape = weight_OI.shape[0], weight_OI.shape[1]
        self.nbytes = weight_OI.nbytes
        self._packed, self._arrive = self._place(in_blocks(weight_OI, 1, WEIGHTS).view(-1, inputs, BLOCK))
        self._bias_O = bias_O

    def apply(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert self._packed is not None, "not loaded"
        if self._arrive is not None:
            self._arrive()
        packed, bias_O, (outputs, inputs) = self._packed, self._bias_O, self._shape
        x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
        assert x_TI.shape[1] == inputs and x_TI.dtype is packed.dtype
        assert bias_O is None or (bias_O.is_contiguous() and bias_O.dtype is packed.dtype)
        rows, width = x_TI.shape[0], -(-inputs // LANES) * LANES
        wide_rows = 0 if rows <= FEW else min(rows, max(LEAST_WIDE_ROWS, WIDE_FLOATS // width))
        _here.wide.reserve(wide_rows * width)
        y_TO = torch.empty(rows, outputs, dtype=packed.dtype)
        self._kernel(
            packed.data_ptr(), x_TI.data_ptr(), x_TI.stride(0), None if bias_O is None else bias_O.data_ptr(),
            y_TO.data_ptr(), rows, inputs, outputs, _here.wide.address, wide_rows, torch.get_num_threads(),
        )  # fmt: skip
        return y_TO


class SkinnyMethod(PackedMethod):
    """A weight in oneDNN's layout, multiplied by the skinny GEMM alone."""

    def take(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        super().take(weight_OI, bias_O)
        if self._skinny is None:
            raise SettingsError(
                f"oneDNN lays a matrix of {tuple(weight_OI.shape)} out as the skinny GEMM cannot read it",
                "--batch-invariant",
            )


def row_methods(library: ctypes.CDLL, skinny: CpuSkinnyGemm | None) -> MakeMethod:
    """Returns the MakeMethod of dense weights. library: of cpu_invariant_library(). skinny: multiplies any number of
    rows; None where it has no such kernel. A weight whose parts are multiplied by others is left to them."""
    assert ctypes.c_int.in_dll(library, "row_gemm_few").value == FEW
    kernel = Kernel(
        library, "row_gemm", POINTER, POINTER, NUMBER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, POINTER, NUMBER, COUNT
    )

    def make(weights: Sequence[Param], context: ParallelContext, /, place: Place = as_given) -> LinearMethod:
        if not all(weight.packs for weight in weights):
            return DenseMethod(place)  # the latents' heads: kernels/cpu/attention/cpu_latent_attention.py
        if skinny is not None and weights[0].span(1, context.mesh).length % DEPTH == 0:
            return SkinnyMethod(place, skinny)
        return RowMethod(kernel, place)

    return make
