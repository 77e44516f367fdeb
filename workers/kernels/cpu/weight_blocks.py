"""Packs weights into blocks of 64 outputs, as CPU kernels and oneDNN read them.

    packed[b, i, o, n] = W[64 b + o, k i + n],  0 <= n < k

The layout is [O / 64][I / k][64][k], padded with zeros; k inputs are multiplied at once: 2 by products of bf16 pairs,
else 1. The kernel turns tiles of the weight around in registers and writes past the caches, into pages that each thread
asks for at once (as parallel/stored/fresh_pages.py does); its twin is torch's transposition. bf16 and float32. Called
when weights are loaded. O outputs, I inputs.
"""

from functools import cache

import torch

from tandem.workers.kernels.cpu.cpu_build import cpu_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel

BLOCK = 64
CACHE_LINE = 64


def in_blocks(weight_OI: torch.Tensor, together: int) -> torch.Tensor:
    """Returns a weight in the layout, [blocks, I / k, 64, k] with k = `together`, which divides I."""
    outputs, inputs = weight_OI.shape
    kernel, unit_bytes = pack_kernel(weight_OI.dtype), together * weight_OI.element_size()
    if kernel is None or unit_bytes not in (2, 4):
        return torch_in_blocks(weight_OI, together)
    assert inputs % together == 0, (inputs, together)
    weight_OI = weight_OI.contiguous()
    blocks = -(-outputs // BLOCK)
    packed = torch.empty(blocks * BLOCK * inputs * weight_OI.element_size(), dtype=torch.uint8)
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
