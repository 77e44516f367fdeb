"""KVStore compiled for CPUs: quantizes on writing to the cache, converts back on gathering whole blocks.

Formulas in kv_store.py, whose TorchKVStore is the twin, with bit-equal codes and scales. Computes in bf16 or fp32; the
cache has the same type, int8, fp8 e4m3, or bf16 under fp32. Called by
workers/attention/cpu_paged.py. T tokens, K KV heads, D head dim.
"""

import ctypes

import torch

from tandem.workers.kernels.cpu.cpu_build import cpu_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, Kernel
from tandem.workers.kernels.kv_store import LayerKV


class CpuKVStore:
    """The compiled store for one compute type and one storage type."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._write = Kernel(
            library, "write_kv", POINTER, NUMBER, POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER,
            NUMBER, NUMBER, COUNT,
        )  # fmt: skip
        self._gather = Kernel(
            library, "gather_blocks", POINTER, POINTER, POINTER, NUMBER, POINTER, NUMBER, NUMBER, COUNT
        )

    @classmethod
    def make(cls, dtype: torch.dtype, storage: torch.dtype) -> "CpuKVStore | None":
        """Returns the store; None for unsupported types, or when compilation failed."""
        library = cpu_library(dtype, storage)
        return None if library is None else cls(library)

    def write(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, slots_T: torch.Tensor) -> None:
        _, heads, dim = k_TKD.shape
        assert k_TKD.stride()[1:] == v_TKD.stride()[1:] == (dim, 1)
        assert kv.keys.is_contiguous() and kv.values.is_contiguous()
        self._write(
            k_TKD.data_ptr(), k_TKD.stride(0), v_TKD.data_ptr(), v_TKD.stride(0), kv.keys.data_ptr(),
            kv.values.data_ptr(), address(kv.key_scales), address(kv.value_scales), slots_T.data_ptr(),
            slots_T.shape[0], heads, dim, torch.get_num_threads(),
        )  # fmt: skip

    def gather(
        self, cache: torch.Tensor, scales: torch.Tensor | None, block_ids: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        assert cache.is_contiguous() and out.is_contiguous() and block_ids.dtype is torch.int64
        _, block_size, heads, dim = cache.shape
        self._gather(
            cache.data_ptr(), address(scales), block_ids.data_ptr(), block_ids.shape[0], out.data_ptr(),
            block_size * heads, dim, torch.get_num_threads(),
        )  # fmt: skip
        return out


def address(scales: torch.Tensor | None) -> int | None:
    """Returns the address of contiguous scales; None for None."""
    assert scales is None or scales.is_contiguous()
    return None if scales is None else scales.data_ptr()
