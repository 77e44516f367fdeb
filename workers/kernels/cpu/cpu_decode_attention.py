"""Paged decode attention for CPUs: each row has one query and reads its K and V in place, once.

    out[r, n] = softmax_j(cap(scale * q[r, n] . k[j, n / G]) - slope[n] * (p - j)) v[j, n / G]

over the visible positions j of row r, whose query is at p; a head's sink takes its share of the softmax and adds
nothing.

A row's context is split into partitions, so that one long row keeps all threads busy; partitions are merged by their
maxima and weights (flash-decoding, Dao et al. 2023); positions before a window are not read. bf16 and fp32, computed in
fp32 (q . k of bf16 by VDPBF16PS, if present); head dims up to 256, a head's last vector being read in part. A cache
of another type (kv_store.py) is converted in registers, and a token's scale multiplies its score and its weight instead
of its elements. Called by workers/attention/cpu_paged.py; the torch twin is workers/attention/torch_sdpa.py. T tokens,
N query heads, K KV heads, G = N / K, D head dim.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from tandem.workers.kernels.cpu.cpu_build import cpu_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel, OfHeads, Scratch
from tandem.workers.kernels.cpu.cpu_kv_quant import address
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams

MAX_HEAD_DIM = 256
PARTITION_TOKENS = 128
LANES = 16
Rows = Sequence[tuple[int, int, int, int]]
Task = tuple[int, int, int, int, int]


class DecodeWork:
    """The rows of a step that are attended under one window, split into partitions, for all layers with that window.

    tasks: int32 [tasks, 5]: row of the block table, token, first position, last position + 1, the query's position.
    rows: int32 [rows, 3]: token, first task, last task + 1. Captured calls read the rows that set_rows was last given.
    most_parts: tasks of a row; room: of how many tasks a kernel holds the sums at a time, where it does not hold all.
    """

    def __init__(self, rows: Rows, block_table_RN: torch.Tensor, block_size: int) -> None:
        self.table, self.tasks, self.rows = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.table_stride, self.num_tasks, self.num_rows = ctypes.c_long(), ctypes.c_long(), ctypes.c_long()
        self.scratch_size, self.room = ctypes.c_long(), ctypes.c_long()
        self.set_rows(rows, block_table_RN, block_size)

    def set_rows(self, rows: Rows, block_table_RN: torch.Tensor, block_size: int) -> None:
        """Replaces the rows: (row of the int32 block table, token, first visible position, last position + 1)."""
        assert block_table_RN.stride(1) == 1
        tasks, spans = partition_rows(rows, block_size)
        self.longest = max(stop - start for _, _, start, stop, _ in tasks)
        self.most_parts = max(stop - start for _, start, stop in spans)
        arrays = (torch.from_numpy(np.array(numbers, np.int32)) for numbers in (tasks, spans))
        self._held = held = (block_table_RN, *arrays)
        for cell, tensor in zip((self.table, self.tasks, self.rows), held, strict=True):
            cell.value = tensor.data_ptr()
        self.table_stride.value, self.num_tasks.value = block_table_RN.stride(0), len(tasks)
        self.num_rows.value = len(spans)


def partition_rows(rows: Rows, block_size: int) -> tuple[list[Task], list[tuple[int, int, int]]]:
    """Returns the partitions of all rows, and each row's range of them, as in DecodeWork."""
    size = max(1, PARTITION_TOKENS // block_size) * block_size
    tasks: list[Task] = []
    spans: list[tuple[int, int, int]] = []
    for table_row, token, first, last in rows:
        begin = len(tasks)
        starts = [first, *range((first // size + 1) * size, last, size)]
        tasks += [
            (table_row, token, start, stop, last - 1) for start, stop in zip(starts, [*starts[1:], last], strict=True)
        ]
        spans.append((token, begin, len(tasks)))
    return tasks, spans


class CpuDecodeAttention:
    """The compiled kernel for one element type. It keeps scratch memory between calls, so it serves one thread."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._partials, self._scratch, self._of_heads = Scratch(), Scratch(), OfHeads()
        self._attend = Kernel(
            library, "decode_attention", POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER,
            POINTER, NUMBER, POINTER, NUMBER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, REAL, REAL,
            POINTER, POINTER, COUNT,
        )  # fmt: skip

    @classmethod
    def make(cls, dtype: torch.dtype, head_dim: int, storage: torch.dtype) -> "CpuDecodeAttention | None":
        """Returns the kernel; None for unsupported types or head dims, or when compilation failed."""
        library = cpu_library(dtype, storage) if head_dim <= MAX_HEAD_DIM else None
        return None if library is None else cls(library)

    def reserve(self, work: DecodeWork, num_heads: int, head_dim: int) -> None:
        """Reserves memory for this work, before each step's first call with it."""
        padded = up_to(2 * LANES, head_dim)
        work.scratch_size.value = num_heads * (padded + up_to(LANES, work.longest))  # of a thread: queries and scores
        self._partials.reserve(work.num_tasks.value * up_to(LANES, num_heads * (padded + 2)))
        self._scratch.reserve(torch.get_num_threads() * work.scratch_size.value)

    def attend(
        self, q_TND: torch.Tensor, kv: LayerKV, out_TND: torch.Tensor, work: DecodeWork, params: AttentionParams
    ) -> None:
        """Fills the rows' tokens of out_TND (contiguous). The heads of q are contiguous per token; memory has been
        reserved."""
        _, num_heads, head_dim = q_TND.shape
        assert out_TND.is_contiguous() and q_TND.stride()[1:] == (head_dim, 1)
        assert kv.keys.is_contiguous() and kv.values.is_contiguous()
        self._attend(
            q_TND.data_ptr(), q_TND.stride(0), kv.keys.data_ptr(), kv.values.data_ptr(), address(kv.key_scales),
            address(kv.value_scales), out_TND.data_ptr(), work.table, work.table_stride, work.tasks, work.num_tasks,
            work.rows, work.num_rows, self._partials.address, self._scratch.address, work.scratch_size,
            num_heads, kv.keys.shape[2], head_dim, kv.keys.shape[1], params.scale, params.softcap or 0.0,
            self._of_heads.array(params.slopes), self._of_heads.array(params.sinks), torch.get_num_threads(),
        )  # fmt: skip


def up_to(unit: int, size: int) -> int:
    """Returns the least multiple of `unit` that is not below size."""
    return -(-size // unit) * unit
