"""The product of few rows (decode batches) with a packed weight, for CPUs that multiply pairs of bf16.

    y[t, o] = sum_i x[t, i] W[o, i] + b[o],  1 <= T <= 64

Reads the weight where oneDNN has packed it, so there is one copy of it and longer inputs (prompts) stay with oneDNN.
The weight is read once, in the order in which it lies, while all rows pass over each piece in the first cache; a row's
result does not depend on the rows beside it. bf16, summed in fp32 (by VDPBF16PS, to which denormals are 0), rounded
once. Called through parallel/matmul.py, whose oneDNN product is the twin and serves what this does not: other types,
layouts and CPUs, inputs that are not whole blocks. T rows, I inputs, O outputs.

oneDNN's layout: blocks of 64 outputs x 32 inputs, each [16 pairs of inputs][64 outputs][2], in the order [O / 64]
[I / 32], padded with zeros. That is read off its descriptor of each matrix, all of it, and tried once on a small one.
"""

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch

from parallel.matmul import can_pack
from workers.kernels.cpu_build import cpu_library
from workers.kernels.cpu_calls import COUNT, NUMBER, POINTER, Kernel

MOST_ROWS = 64
BLOCK, DEPTH = 64, 32
DESCRIPTOR_BYTES = 772


class CpuFewRows:
    """The compiled kernel."""

    most_rows = MOST_ROWS

    def __init__(self, library: ctypes.CDLL) -> None:
        assert ctypes.c_int.in_dll(library, "few_rows_most").value == MOST_ROWS
        self._multiply = Kernel(
            library, "few_rows", POINTER, POINTER, NUMBER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, COUNT
        )

    def bind(
        self, packed: torch.Tensor, bias_O: torch.Tensor | None, outputs: int
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """x_TI -> y_TO with this weight, which stays where it is; None where its layout is not the one read here."""
        inputs = packed.shape[1]
        if packed.dtype is not torch.bfloat16 or inputs % DEPTH or describe(packed) != descriptor(outputs, inputs):
            return None
        assert bias_O is None or (bias_O.is_contiguous() and bias_O.dtype is packed.dtype)
        return _Product(self._multiply, packed, bias_O, outputs)


class _Product:
    """x_TI -> y_TO with one weight, which it keeps alive."""

    def __init__(self, multiply: Kernel, packed: torch.Tensor, bias_O: torch.Tensor | None, outputs: int) -> None:
        self._multiply, self._packed, self._bias_O = multiply, packed, bias_O
        self._weight = torch.ops.mkldnn.data_ptr(packed)
        self._bias = None if bias_O is None else bias_O.data_ptr()
        self._inputs, self._outputs = packed.shape[1], outputs

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        assert x_TI.dtype is torch.bfloat16 and x_TI.shape[1] == self._inputs and x_TI.shape[0] <= MOST_ROWS
        if x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        y_TO = torch.empty(x_TI.shape[0], self._outputs, dtype=torch.bfloat16)
        self._multiply(
            self._weight, x_TI.data_ptr(), x_TI.stride(0), self._bias, y_TO.data_ptr(), x_TI.shape[0], self._inputs,
            self._outputs, torch.get_num_threads(),
        )  # fmt: skip
        return y_TO


@cache
def select_few_rows(device: torch.device, dtype: torch.dtype) -> CpuFewRows | None:
    """The kernel, or None where this device, type, CPU or build of torch does not have what it needs."""
    if device.type != "cpu" or dtype is not torch.bfloat16 or not can_pack(dtype):
        return None
    library = cpu_library(dtype)
    if library is None or not hasattr(library, "few_rows") or not _layout_is_known():
        return None
    return CpuFewRows(library)


def describe(packed: torch.Tensor) -> bytes:
    """oneDNN's descriptor of a packed matrix."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())


def descriptor(outputs: int, inputs: int) -> bytes:
    """The descriptor of a bf16 matrix [outputs, inputs] in the kernel's layout: fields at their offsets."""
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
    """Whether a small matrix of numbers that tell their place lies in memory as the kernel reads it."""
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
