"""Skinny GEMM: a product of 1 to 64 rows (decode batches) with a packed weight, for CPUs that multiply pairs of bf16.

    y[t, o] = sum_i x[t, i] W[o, i] + b[o],  1 <= T <= 64

It reads the weight in oneDNN's packed layout, so there is one copy and longer inputs (prefill) stay with oneDNN. The
weight is read once, in memory order, while all rows pass over each piece in the L1 cache; a row's result does not
depend on its batch mates. bf16, summed in fp32 (by VDPBF16PS, which treats denormals as 0), rounded once. Called
through parallel/linear_methods.py, whose oneDNN product is the twin and serves other types, layouts and CPUs, and
inputs that are not multiples of a block. T rows, I inputs, O outputs.

The layout: blocks of 64 outputs x 32 inputs, each [16 pairs of inputs][64 outputs][2], in the order [O / 64] [I / 32],
padded with zeros. The whole oneDNN descriptor of each matrix is compared, and a small matrix is checked once.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch

from tandem.parallel.linear_methods import can_pack
from tandem.workers.kernels.cpu.cpu_build import cpu_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel

MAX_ROWS = 64
BLOCK, DEPTH = 64, 32
DESCRIPTOR_BYTES = 772


class CpuSkinnyGemm:
    """The compiled kernel. max_rows: what it is to multiply; more than MAX_ROWS go in pieces, each of which reads the
    weight."""

    def __init__(self, library: ctypes.CDLL, max_rows: int = MAX_ROWS) -> None:
        self.max_rows = max_rows
        assert ctypes.c_int.in_dll(library, "skinny_gemm_max_rows").value == MAX_ROWS
        self._multiply = Kernel(
            library, "skinny_gemm", POINTER, POINTER, NUMBER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, COUNT
        )

    def bind(
        self, packed: torch.Tensor, bias_O: torch.Tensor | None, outputs: int
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Returns x_TI -> y_TO with this weight, which is not copied; None when it has another layout."""
        inputs = packed.shape[1]
        if packed.dtype is not torch.bfloat16 or inputs % DEPTH or describe(packed) != descriptor(outputs, inputs):
            return None
        assert bias_O is None or (bias_O.is_contiguous() and bias_O.dtype is packed.dtype)
        return _Product(self._multiply, packed, bias_O, outputs)


class _Product:
    """The product x_TI -> y_TO with one weight, which it keeps alive."""

    def __init__(self, multiply: Kernel, packed: torch.Tensor, bias_O: torch.Tensor | None, outputs: int) -> None:
        self._multiply, self._packed, self._bias_O = multiply, packed, bias_O
        self._weight = torch.ops.mkldnn.data_ptr(packed)
        self._bias = None if bias_O is None else bias_O.data_ptr()
        self._inputs, self._outputs = packed.shape[1], outputs

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.dtype is torch.bfloat16 and x_TI.shape[1] == self._inputs
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        rows, stride = x_TI.shape[0], x_TI.stride(0)
        y_TO = torch.empty(rows, self._outputs, dtype=torch.bfloat16)
        x, y, size = x_TI.data_ptr(), y_TO.data_ptr(), y_TO.element_size()
        for first in range(0, rows, MAX_ROWS):
            self._multiply(
                self._weight, x + first * stride * size, stride, self._bias, y + first * self._outputs * size,
                min(MAX_ROWS, rows - first), self._inputs, self._outputs, torch.get_num_threads(),
            )  # fmt: skip
        return y_TO


@cache
def skinny_gemm(dtype: torch.dtype, max_rows: int = MAX_ROWS) -> CpuSkinnyGemm | None:
    """Returns the kernel; None where this dtype, CPU or torch build does not support it. max_rows: as in
    CpuSkinnyGemm."""
    if dtype is not torch.bfloat16 or not can_pack(dtype):
        return None
    library = cpu_library(dtype)
    if library is None or not hasattr(library, "skinny_gemm") or not _layout_is_known():
        return None
    return CpuSkinnyGemm(library, max_rows)


def describe(packed: torch.Tensor) -> bytes:
    """Returns oneDNN's descriptor of a packed matrix."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())


def descriptor(outputs: int, inputs: int) -> bytes:
    """Returns the descriptor of a bf16 matrix [outputs, inputs] in the kernel's layout: fields at their offsets."""
    expected = bytearray(DESCRIPTOR_BYTES)
    padded = [-(-outputs // BLOCK) * BLOCK, -(-inputs // DEPTH) * DEPTH]
    axes, bf16, blocked = 2, 2, 2
    strides = [padded[1] * BLOCK, BLOCK * DEPTH]
    for at, number in ((0, 1), (4, axes), (104, bf16), (312, blocked), (416, 3), (768, 1)):
        struct.pack_into("<i", expected, at, number)
    for at, numbers in ((8, [outputs, inputs]), (112, padded), (320, strides), (424, [16, 64, 2]), (520, [1, 0, 1])):
        struct.pack_into(f"<{len(numbers)}q", expected, at, *numbers)
    return bytes(expected)


def _layout_is_known() -> bool:
    """Returns whether a small matrix of distinct numbers is laid out in memory as the kernel reads it."""
    outputs, inputs = BLOCK + 1, 2 * DEPTH
    weight_OI = torch.arange(outputs * inputs, dtype=torch.int16).view(torch.bfloat16).view(outputs, inputs)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI)
    if not packed.is_mkldnn or describe(packed) != descriptor(outputs, inputs):
        return False
    size = int(torch.ops.mkldnn._nbytes(packed))
    memory = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    found = torch.frombuffer(memory, dtype=torch.int16).clone()
    padded = torch.zeros(2 * BLOCK, inputs, dtype=torch.int16)
    padded[:outputs] = weight_OI.view(torch.int16)
    blocks = padded.view(2, BLOCK, inputs // DEPTH, DEPTH // 2, 2)
    return torch.equal(found, blocks.permute(0, 2, 3, 1, 4).reshape(-1))
