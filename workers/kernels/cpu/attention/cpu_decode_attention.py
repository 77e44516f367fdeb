"""Paged decode attention for CPUs: each row has a few queries and reads its K and V in place, once for all of them.

    out[r, n] = softmax_j(cap(scale * q[r, n] . k[j, n / G]) - slope[n] * (p - j)) v[j, n / G]

over the visible positions j of row r, whose query is at p; a head's sink takes its share of the softmax and adds
nothing. Queries one behind the other, as those of a token and its drafts, are computed together, and each as it would
be alone, to the last bit: what they share is read, not summed.

A row's context is split into partitions, so that one long row keeps all threads busy; partitions are merged by their
maxima and weights (flash-decoding, Dao et al. 2023); positions before a window are not read. bf16 and fp32, computed in
fp32 (q . k of bf16 by VDPBF16PS, if present); head dims up to 256, a head's last vector being read in part. A cache
of another type (kv_store.py) is converted in registers, and a token's scale multiplies its score and its weight instead
of its elements. Called by workers/attention/cpu_paged.py; the torch twin is workers/attention/torch_sdpa.py. T tokens,
N query heads, K KV heads, G = N / K, D head dim.
"""

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.configs.platform_facts import MOST_HEAD_DIM
from tandem.workers.kernels.cpu.cpu_build import cpu_decode_library
from tandem.workers.kernels.cpu.cpu_calls import COUNT, NUMBER, POINTER, REAL, Kernel, OfHeads, Scratch
from tandem.workers.kernels.cpu.cpu_kv_quant import address
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams

PARTITION_TOKENS = 128
TOGETHER = 8
"""Queries of a row that are computed together at most: their sums stay in the L2 cache."""
LANES = 16
Ints = npt.NDArray[np.int64]


class Queries(NamedTuple):
    """Tokens to attend for, each as a row of its own: its row in the block table, its place in the step, and the end of
    its context, the position behind its own."""

    row: Ints
    token: Ints
    end: Ints


class DecodeTable:
    """An int32 block table. Captured calls read the one that set_table was last given."""

    def __init__(self, block_table_RN: torch.Tensor) -> None:
        self.address, self.stride = ctypes.c_void_p(), ctypes.c_long()
        self.set_table(block_table_RN)

    def set_table(self, block_table_RN: torch.Tensor) -> None:
        assert block_table_RN.stride(1) == 1
        self._held = block_table_RN
        self.address.value, self.stride.value = block_table_RN.data_ptr(), block_table_RN.stride(0)


class DecodeWork:
    """Queries under one window, split into partitions, for all layers with that window, whatever their block tables.

    tasks: int32 [tasks, 7]: row of the block table, token, first position, last position + 1, the first query's
    position, queries, place of its sums. rows, one for each query: int32 [rows, 5]: token, place of its first sums,
    how many there are, queries that have sums together, which of them it is. Captured calls read the queries that
    set_queries was last given. together: queries of a task, at most. most_parts: tasks of a row; room: of how many
    tasks a kernel holds the sums at a time, where it does not hold all.
    """

    def __init__(self, queries: Queries, window: int | None, block_size: int, together: int) -> None:
        self._window, self._block_size, self._together = window, block_size, together
        self.tasks, self.rows = ctypes.c_void_p(), ctypes.c_void_p()
        self.num_tasks, self.num_rows = ctypes.c_long(), ctypes.c_long()
        self.scratch_size, self.room = ctypes.c_long(), ctypes.c_long()
        self.set_queries(queries)

    def set_queries(self, queries: Queries) -> None:
        """Replaces the queries, of which there is one at least."""
        self._held = tasks, rows = partitions(queries, self._window, self._block_size, self._together)
        self.longest = int((tasks[:, 3] - tasks[:, 2]).max())
        self.most_parts, self.most_queries = int(rows[:, 2].max()), int(tasks[:, 5].max())
        self.num_sums = int(tasks[:, 5].sum())
        self.tasks.value, self.rows.value = tasks.ctypes.data, rows.ctypes.data
        self.num_tasks.value, self.num_rows.value = len(tasks), len(rows)


def partitions(
    queries: Queries, window: int | None, block_size: int, together: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns tasks and rows as in DecodeWork: contexts are cut at multiples of PARTITION_TOKENS."""
    size = max(1, PARTITION_TOKENS // block_size) * block_size
    row, token, end = queries
    lead, count = _groups(queries, together)
    group = np.arange(len(lead)).repeat(count)  # of each query
    seen = np.zeros_like(end) if window is None else np.maximum(end - window, 0)  # the first position
    first, last = seen[lead], end[lead + count - 1]
    hidden = first // size
    parts = (last - 1) // size - hidden + 1
    begins = parts.cumsum() - parts  # first task of each group
    of = np.arange(len(lead)).repeat(parts)
    start = (np.arange(len(of)) + (hidden - begins)[of]) * size
    sums = count[of].cumsum() - count[of]
    tasks = np.empty((len(of), 7), np.int32)
    tasks[:, 0], tasks[:, 1], tasks[:, 4] = row[lead][of], token[lead][of], end[lead][of] - 1
    tasks[:, 2], tasks[:, 3] = np.maximum(start, first[of]), np.minimum(start + size, last[of])
    tasks[:, 5], tasks[:, 6] = count[of], sums
    own = seen // size  # number of the first partition that a query sees
    rows = np.empty((len(row), 5), np.int32)
    rows[:, 0], rows[:, 1] = token, sums[begins[group] + own - hidden[group]]
    rows[:, 2], rows[:, 3] = (end - 1) // size - own + 1, count[group]
    rows[:, 4] = np.arange(len(row)) - lead[group]
    return tasks, rows


def _groups(queries: Queries, together: int) -> tuple[Ints, Ints]:
    """Returns the first query and the number of those that are computed together: of one row, one behind the other, at
    most `together`, as evenly as may be."""
    row, token, end = queries
    follows = (row[1:] == row[:-1]) & (token[1:] == token[:-1] + 1) & (end[1:] == end[:-1] + 1)
    begins = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    lengths = np.diff(begins, append=len(row))
    pieces = -(-lengths // together)
    run = np.arange(len(begins)).repeat(pieces)
    piece = np.arange(len(run)) - (pieces.cumsum() - pieces)[run]
    lead = begins[run] + piece * lengths[run] // pieces[run]
    return lead, np.diff(lead, append=len(row))


class CpuDecodeAttention:
    """The compiled kernel for one element type. It keeps scratch memory between calls, so it serves one thread."""

    together = TOGETHER

    def __init__(self, library: ctypes.CDLL) -> None:
        self._partials, self._scratch, self._of_heads = Scratch(), Scratch(), OfHeads()
        self._attend = Kernel(
            library, "decode_attention", POINTER, NUMBER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, NUMBER,
            POINTER, NUMBER, POINTER, NUMBER, POINTER, POINTER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, NUMBER, REAL,
            REAL, POINTER, POINTER, COUNT,
        )  # fmt: skip

    @classmethod
    def make(cls, dtype: torch.dtype, head_dim: int, storage: torch.dtype) -> "CpuDecodeAttention | None":
        """Returns the kernel; None for unsupported types or head dims, or when compilation failed."""
        library = cpu_decode_library(dtype, storage, head_dim) if head_dim <= MOST_HEAD_DIM else None
        return None if library is None else cls(library)

    def reserve(self, work: DecodeWork, num_heads: int, head_dim: int) -> None:
        """Reserves memory for this work, before each step's first call with it."""
        padded = up_to(2 * LANES, head_dim)
        scores = up_to(LANES, work.longest) + (LANES if work.most_queries > 1 else 0)
        work.scratch_size.value = work.most_queries * num_heads * (padded + scores)  # of a thread: queries and scores
        self._partials.reserve(work.num_sums * up_to(LANES, num_heads * (padded + 2)))
        self._scratch.reserve(torch.get_num_threads() * work.scratch_size.value)

    def attend(
        self,
        q_TND: torch.Tensor,
        kv: LayerKV,
        out_TND: torch.Tensor,
        work: DecodeWork,
        table: DecodeTable,
        params: AttentionParams,
    ) -> None:
        """Fills the rows' tokens of out_TND (contiguous). The heads of q are contiguous per token; memory has been
        reserved."""
        _, num_heads, head_dim = q_TND.shape
        assert out_TND.is_contiguous() and q_TND.stride()[1:] == (head_dim, 1)
        assert kv.keys.is_contiguous() and kv.values.is_contiguous()
        self._attend(
            q_TND.data_ptr(), q_TND.stride(0), kv.keys.data_ptr(), kv.values.data_ptr(), address(kv.key_scales),
            address(kv.value_scales), out_TND.data_ptr(), table.address, table.stride, work.tasks, work.num_tasks,
            work.rows, work.num_rows, self._partials.address, self._scratch.address, work.scratch_size,
            num_heads, kv.keys.shape[2], head_dim, kv.keys.shape[1], params.window or 0, params.scale,
            params.softcap or 0.0,
            self._of_heads.array(params.slopes), self._of_heads.array(params.sinks), torch.get_num_threads(),
        )  # fmt: skip


def up_to(unit: int, size: int) -> int:
    """Returns the least multiple of `unit` that is not below size."""
    return -(-size // unit) * unit
