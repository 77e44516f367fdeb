"""Paged attention on CPU: a compiled decode kernel that reads the cache in place; matmuls and a compiled softmax for
prefill. Both compute any AttentionParams.

CpuAttention is chosen by workers/platforms/cpu.py where the kernels can be compiled; torch_sdpa.py is the twin that
needs no compiler. The cache may have any dtype that kernel and store were compiled for. Shapes as in backend.py.

Without a chunk kernel, as --batch-invariant makes it (cpu_invariant.py), the decode kernel gets prompts too: each token
is a row of its own, whose context is split at multiples of 128 positions from its first visible one on, by nothing but
the token's own position, and whose parts are merged in order. So a token's result depends neither on the chunk that it
is computed in nor on other rows. In long prompts the context is then read once for each token: see docs/performance.md
for what that costs.
"""

from collections.abc import Hashable

import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep
from tandem.workers.attention.chunks import ChunkAttention, Gatherer
from tandem.workers.attention.cpu_rows import MOST_PARTS, QueryRows, decode_key
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.row_layout import RowLayouts
from tandem.workers.kernels.cpu.attention.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import CpuDecodeAttention
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class CpuAttention:
    """The backend. chunk_kernel: None for --batch-invariant. It keeps scratch memory between steps, so one instance
    serves one decoder on one thread."""

    def __init__(self, kernel: CpuDecodeAttention, store: KVStore, chunk_kernel: CpuChunkAttention | None) -> None:
        self.name = "cpu-one-query" if chunk_kernel is None else "cpu-paged"
        self._kernel = kernel
        self._chunk_kernel = chunk_kernel
        self._gatherer = Gatherer(store)

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        if self._chunk_kernel is None:
            return _HeadQueries(self._kernel, QueryRows(batch, self._kernel, most_parts=MOST_PARTS))
        if decode_key(max(batch.query_lens_list)) is None:
            return _HeadChunks(batch, self._kernel, self._chunk_kernel, self._gatherer)
        return _HeadQueries(self._kernel, QueryRows(batch, self._kernel))

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return decode_key(shape.most_queries)

    def prepare_replay(self, batch: ForwardBatch) -> "_HeadQueries":
        return _HeadQueries(self._kernel, QueryRows(batch, self._kernel))


class _HeadQueries:
    """A step all of whose queries the decode kernel takes one by one."""

    def __init__(self, kernel: CpuDecodeAttention, rows: QueryRows) -> None:
        self._kernel = kernel
        self._rows = rows

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype)
        table = self._rows.table(kv.group)
        for work in self._rows.works(params.window, q_TND.shape[1], q_TND.shape[2]):
            self._kernel.attend(q_TND, kv, out_TND, work, table, params)
        return out_TND

    def set_batch(self, batch: ForwardBatch) -> None:
        self._rows.set_batch(batch)


class _HeadChunks:
    """A step with chunks, and perhaps decodes."""

    def __init__(
        self, batch: ForwardBatch, kernel: CpuDecodeAttention, chunk_attention: ChunkAttention, gatherer: Gatherer
    ) -> None:
        self._decodes = _HeadQueries(kernel, QueryRows(batch, kernel, DECODE_QUERIES))
        self._layouts = RowLayouts(batch, DECODE_QUERIES)
        self._chunk_attention = chunk_attention
        self._gatherer = gatherer

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        out_TND = self._decodes.attend(q_TND, k_TKD, v_TKD, kv, params)
        for chunk in self._layouts.of(params.window, kv, k_TKD.dtype).chunks:
            k_JKD, v_JKD = self._gatherer.context(chunk, k_TKD, v_TKD, kv)
            own = slice(chunk.start, chunk.stop)
            out_TND[own] = self._chunk_attention.attend(q_TND[own], k_JKD, v_JKD, params)
        return out_TND
