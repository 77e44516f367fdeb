"""Paged decode attention for CPUs: each row has one query and reads its K and V where they lie, once.

    out[r, n] = softmax_j(scale * q[r, n] . k[j, n / G]) v[j, n / G],  j over the positions that row r sees

A row's context is cut in partitions, so that one long row keeps all threads busy; partitions are merged by their
maxima and weights (flash-decoding, Dao et al. 2023). bf16 and fp32, computed in fp32 (q . k of bf16 by VDPBF16PS, where
there is one); head dims that are multiples of
16 up to 256. The cache may hold another type than q (kv_quant.py): it is converted in registers, and a token's scale
multiplies its score and its weight, not its elements. Called by workers/attention/cpu.py; the torch twin is
workers/attention/torch_sdpa.py. T tokens, N query heads, K KV heads, G = N / K, D head dim.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.kernels.cpu_build import cpu_library
from workers.kernels.cpu_kv_quant import address
from workers.kernels.kv_quant import LayerKV

MAX_HEAD_DIM = 256
PARTITION_TOKENS = 128
LANES = 16


@dataclass(frozen=True, slots=True)
class DecodeTasks:
    """Which rows are attended, cut in partitions. Made once per step and window.

    tasks: int32 [tasks, 4]: row of the block table, token, first position, last position + 1. rows: int32 [rows, 3]:
    token, first task, last task + 1.
    """

    tasks: torch.Tensor
    rows: torch.Tensor
    longest: int


def cut_tasks(rows: Sequence[tuple[int, int, int, int]], block_size: int) -> DecodeTasks:
    """Partitions of (row of the block table, token, first position seen, last position + 1)."""
    size = max(1, PARTITION_TOKENS // block_size) * block_size
    tasks: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int]] = []
    for table_row, token, first, last in rows:
        begin = len(tasks)
        starts = [first, *range((first // size + 1) * size, last, size)]
        tasks += [(table_row, token, start, stop) for start, stop in zip(starts, [*starts[1:], last], strict=True)]
        spans.append((token, begin, len(tasks)))
    longest = max(stop - start for _, _, start, stop in tasks)
    return DecodeTasks(torch.tensor(tasks, dtype=torch.int32), torch.tensor(spans, dtype=torch.int32), longest)


class CpuDecodeAttention:
    """The compiled kernel for one element type. Keeps scratch memory between calls, so it serves one thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scratch = torch.empty(0)
        pointer, number = ctypes.c_void_p, ctypes.c_long
        self._attend = library.decode_attention
        self._attend.restype = None
        self._attend.argtypes = [
            pointer, number, pointer, pointer, pointer, pointer, pointer, pointer, number, pointer, number, pointer,
            number, pointer, pointer, number, number, number, number, number, ctypes.c_float, ctypes.c_int,
        ]  # fmt: skip

    @classmethod
    def make(cls, dtype: torch.dtype, head_dim: int, storage: torch.dtype) -> "CpuDecodeAttention | None":
        """None when types or head dim are not served, or nothing could be compiled."""
        if head_dim % LANES or head_dim > MAX_HEAD_DIM:
            return None
        library = cpu_library(dtype, storage)
        return None if library is None else cls(library)

    def attend(
        self,
        q_TND: torch.Tensor,
        kv: LayerKV,
        out_TND: torch.Tensor,
        block_table_RN: torch.Tensor,
        work: DecodeTasks,
        scale: float,
    ) -> None:
        """Fills the rows' tokens of out_TND (contiguous). block_table_RN int32; heads of q contiguous per token."""
        _, num_heads, head_dim = q_TND.shape
        assert out_TND.is_contiguous() and q_TND.stride()[1:] == (head_dim, 1) and block_table_RN.stride(1) == 1
        assert kv.keys.is_contiguous() and kv.values.is_contiguous()
        threads, num_tasks = torch.get_num_threads(), work.tasks.shape[0]
        partials_size, scores_size = num_tasks * num_heads * (head_dim + 2), num_heads * (work.longest + LANES)
        if self._scratch.shape[0] < partials_size + threads * scores_size:
            self._scratch = torch.empty(partials_size + threads * scores_size)
        partials = self._scratch.data_ptr()
        scores = partials + 4 * partials_size
        self._attend(
            q_TND.data_ptr(), q_TND.stride(0), kv.keys.data_ptr(), kv.values.data_ptr(), address(kv.key_scales),
            address(kv.value_scales), out_TND.data_ptr(),
            block_table_RN.data_ptr(), block_table_RN.stride(0), work.tasks.data_ptr(), num_tasks,
            work.rows.data_ptr(), work.rows.shape[0], partials, scores, scores_size,
            num_heads, kv.keys.shape[2], head_dim, kv.keys.shape[1], scale, threads,
        )  # fmt: skip
