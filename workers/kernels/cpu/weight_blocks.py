"""Makers of the forms of weights, at load: in_blocks() packs them into blocks of 64 outputs, as CPU kernels and oneDNN
read them; CpuRounding rounds them to codes.

    packed[b, i, o, n] = W[64 b + o, k i + n],  0 <= n < k

The layout is [O / 64][I / k][64][k], padded with zeros; k inputs are multiplied at once: 2 by products of bf16 pairs,
else 1. The kernel turns tiles of the weight around in registers and writes past the caches, into pages that each thread
asks for at once (as parallel/stored/fresh_pages.py does); its twin is torch's transposition. bf16 and float32. Called
when weights are loaded. O outputs, I inputs.

Codes are those of TorchRounding, bit for bit: integers with zeros, and of tables of up to 16 values; others are the
twin's, but for the bounds. G groups of inputs.
"""

import ctypes
from functools import cache

import torch

from tandem.parallel.quantization.code_tables import table_of
from tandem.parallel.quantization.rounding import TORCH_ROUNDING, CodeGroups, Rounding, middles_of
from tandem.parallel.quantization.schemes import Coded
from tandem.workers.kernels.cpu.cpu_build import cpu_library, cpu_rounding_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel
from tandem.workers.kernels.huge_pages import HugePages

BLOCK = 64
CACHE_LINE = 64
TABLE = 16


def in_blocks(weight_OI: torch.Tensor, together: int, memory: HugePages | None = None) -> torch.Tensor:
    """Returns a weight in the layout, [blocks, I / k, 64, k] with k = `together`, which divides I. memory: to hold it
    in, for weights that stay."""
    outputs, inputs = weight_OI.shape
    kernel, unit_bytes = pack_kernel(weight_OI.dtype), together * weight_OI.element_size()
    if kernel is None or unit_bytes not in (2, 4):
        return torch_in_blocks(weight_OI, together)
    assert inputs % together == 0, (inputs, together)
    weight_OI = weight_OI.contiguous()
    blocks = -(-outputs // BLOCK)
    size = blocks * BLOCK * inputs * weight_OI.element_size()
    packed = torch.empty(size, dtype=torch.uint8) if memory is None else memory.zeros(size)
    assert packed.data_ptr() % CACHE_LINE == 0
    kernel(weight_OI.data_ptr(), packed.data_ptr(), outputs, inputs // together, unit_bytes, torch.get_num_threads())
    return packed.view(weight_OI.dtype).view(blocks, inputs // together, BLOCK, together)


def torch_in_blocks(weight_OI: torch.Tensor, together: int) -> torch.Tensor:
    """The kernel's twin."""
    outputs, inputs = weight_OI.shape
    padded_OI = weight_OI.new_zeros(-(-outputs // BLOCK) * BLOCK, inputs)
    padded_OI[:outputs] = weight_OI
    return padded_OI.view(-1, BLOCK, inputs // together, together).transpose(1, 2).contiguous()


@cache
def pack_kernel(dtype: torch.dtype) -> Kernel | None:
    """Returns the compiled kernel; None as for cpu_library."""
    library = cpu_library(dtype)
    return None if library is None else Kernel(library, "pack_blocks", POINTER, POINTER, NUMBER, NUMBER, COUNT, COUNT)


class CpuRounding(Rounding):
    """The compiled passes over dense weights."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._bounds = Kernel(library, "code_bounds", POINTER, POINTER, POINTER, COUNT)
        self._codes = Kernel(library, "nearest_codes", POINTER, POINTER, POINTER, REAL, POINTER, POINTER, COUNT)

    def bounds(self, weight_OI: torch.Tensor, ends_G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight_OI = _taken(weight_OI)
        least_OG = torch.empty(len(weight_OI), len(ends_G))
        largest_OG = torch.empty_like(least_OG)
        self._bounds(_dense(weight_OI, ends_G), least_OG.data_ptr(), largest_OG.data_ptr(), torch.get_num_threads())
        return least_OG, largest_OG

    def codes(self, weight_OI: torch.Tensor, scheme: Coded, groups: CodeGroups) -> torch.Tensor:
        table = table_of(scheme)
        if table is not None and len(table) > TABLE:
            return TORCH_ROUNDING.codes(weight_OI, scheme, groups)
        weight_OI, ends_G = _taken(weight_OI), groups.ends_G
        scale_OG, zero_OG = groups.scale_OG.contiguous(), groups.zero_OG.contiguous()
        codes_OI = torch.empty(weight_OI.shape, dtype=torch.uint8)
        places, middles = (None, None) if table is None else middles_of(table)
        if middles is not None:
            middles = torch.nn.functional.pad(middles, (0, TABLE - 1 - len(middles)), value=float("inf"))
        self._codes(
            _dense(weight_OI, ends_G), scale_OG.data_ptr(), zero_OG.data_ptr() if table is None else None,
            float(2**scheme.bits - 1), None if middles is None else middles.data_ptr(), codes_OI.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        if places is None or torch.equal(places, torch.arange(len(places))):
            return codes_OI
        return places[codes_OI.long()]


@cache
def code_rounding() -> Rounding:
    """Returns the passes: compiled, or twins where this CPU or its compiler has none."""
    library = cpu_rounding_library()
    return TORCH_ROUNDING if library is None else CpuRounding(library)


def _taken(weight_OI: torch.Tensor) -> torch.Tensor:
    """Returns a weight in a dtype and layout that the passes read."""
    if weight_OI.dtype not in (torch.float32, torch.bfloat16):
        weight_OI = weight_OI.float()
    return weight_OI if weight_OI.shape[1] <= 1 or weight_OI.stride(1) == 1 else weight_OI.contiguous()


def _dense(weight_OI: torch.Tensor, ends_G: torch.Tensor) -> "ctypes.Array[ctypes.c_long]":
    """Returns the struct of cpu_code_rounding.c."""
    is_bf16 = int(weight_OI.dtype is torch.bfloat16)
    numbers = weight_OI.data_ptr(), weight_OI.stride(0), is_bf16, *weight_OI.shape, len(ends_G), ends_G.data_ptr()
    return (ctypes.c_long * len(numbers))(*numbers)
