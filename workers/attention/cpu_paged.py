"""Paged attention on CPU: a compiled decode kernel that reads the cache in place; matmuls and a compiled softmax for
prefill. Both compute any AttentionParams. For latents there is a decode kernel of their own; their chunks are those of
latent.py.

Chosen by workers/platforms/cpu.py where the kernels can be compiled; torch_sdpa.py is the twin that needs
no compiler. The cache may have any dtype that kernel and store were compiled for. Shapes as in backend.py.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep, ReplayableStep
from tandem.workers.attention.chunks import Chunk, ChunkAttention, Gatherer, chunk_of
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latent import LatentChunks, LatentHeads
from tandem.workers.attention.one_query import queries_of
from tandem.workers.kernels.cpu.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.cpu_decode_attention import CpuDecodeAttention, DecodeTable, DecodeWork
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.kernels.latents.cpu_latent_attention import CpuLatentAttention
from tandem.workers.models.spec.arch import AttentionParams


class CpuAttention:
    """The backend, of heads or of latents by its kernel. It keeps scratch memory between steps, so one instance serves
    one decoder on one thread."""

    name = "cpu-paged"

    def __init__(
        self, kernel: CpuDecodeAttention | CpuLatentAttention, store: KVStore, chunk_kernel: CpuChunkAttention
    ) -> None:
        self._kernel = kernel
        self._chunk_kernel = chunk_kernel
        self._gatherer = Gatherer(store)

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return self._step(batch)

    def replay_key(self, batch: ForwardBatch, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        """The kernel reads rows and lengths at each call: all decodes have one key."""
        return () if max(batch.query_lens_list) <= DECODE_QUERIES else None

    def prepare_replay(self, batch: ForwardBatch, num_tokens: int, scratch_block: int) -> ReplayableStep:
        assert num_tokens == batch.num_tokens, "a step on CPU is not padded"
        return self._step(batch)

    def _step(self, batch: ForwardBatch) -> "_CpuStep":
        return _CpuStep(batch, self._kernel, self._chunk_kernel, self._gatherer)


@dataclass(frozen=True, slots=True)
class _Layout:
    """The rows of a step as the layers of one group with one window see them."""

    decodes: DecodeWork | None
    table: DecodeTable
    chunks: list[Chunk]


class _CpuStep:
    """One step; decodes are sorted once per distinct window, layouts made once for each group of layers too."""

    def __init__(
        self,
        batch: ForwardBatch,
        kernel: CpuDecodeAttention | CpuLatentAttention,
        chunk_attention: ChunkAttention,
        gatherer: Gatherer,
    ) -> None:
        self._batch = batch
        self._kernel = kernel
        self._chunk_attention = chunk_attention
        self._gatherer = gatherer
        self._works: dict[int | None, DecodeWork | None] = {}
        self._layouts: dict[tuple[int | None, int], _Layout] = {}
        self._heads: Sequence[int] = ()

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        kernel = self._kernel
        assert isinstance(kernel, CpuDecodeAttention), "a backend of latents"
        layout = self._layout_of(params.window, kv.group, q_TND.shape[1:], kv.keys.dtype is k_TKD.dtype)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype)
        if layout.decodes is not None:
            kernel.attend(q_TND, kv, out_TND, layout.decodes, layout.table, params)
        for chunk in layout.chunks:
            k_JKD, v_JKD = self._gatherer.context(chunk, k_TKD, v_TKD, kv)
            own = slice(chunk.start, chunk.stop)
            out_TND[own] = self._chunk_attention.attend(q_TND[own], k_JKD, v_JKD, params)
        return out_TND

    def attend_latent(
        self,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        kernel, spec = self._kernel, heads.spec
        assert isinstance(kernel, CpuLatentAttention) and params.window is None, "a backend of heads"
        layout = self._layout_of(None, kv.group, (q_TND.shape[1], spec.head_dim), kv.keys.dtype is q_TND.dtype)
        if layout.decodes is None or layout.chunks:
            return self._with_chunks(layout, q_TND, latents_T1E, kv, params, heads)
        return kernel.attend(q_TND, kv, [layout.decodes], layout.table, params, spec, heads.of_heads())

    def _with_chunks(
        self,
        layout: _Layout,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        """Returns out_TNV of a step with chunks: the decodes' queries alone are absorbed for the kernel."""
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], heads.spec.v_dim))
        if layout.decodes is not None:
            assert isinstance(self._kernel, CpuLatentAttention)
            tokens_D = torch.from_numpy(queries_of(self._batch, DECODE_QUERIES).token)
            works, q_DND, weight_NXL = [layout.decodes], q_TND[tokens_D], heads.of_heads()
            out_TNV[tokens_D] = self._kernel.attend(q_DND, kv, works, layout.table, params, heads.spec, weight_NXL)
        chunks = LatentChunks(self._gatherer, self._chunk_attention, keeps_scores=False)
        for chunk in layout.chunks:
            out_TNV[chunk.start : chunk.stop] = chunks.attend(chunk, q_TND, latents_T1E, kv, params, heads)
        return out_TNV

    def set_batch(self, batch: ForwardBatch) -> None:
        assert not any(layout.chunks for layout in self._layouts.values())
        self._batch = batch
        queries = queries_of(batch, DECODE_QUERIES)
        for work in self._works.values():
            if work is not None:
                work.set_queries(queries)
                self._kernel.reserve(work, *self._heads)
        for (_, group), layout in self._layouts.items():
            layout.table.set_table(batch.block_table(group))

    def _layout_of(self, window: int | None, group: int, heads: Sequence[int], is_exact: bool) -> _Layout:
        """heads: how many there are and how wide they are in the cache."""
        layout = self._layouts.get((window, group))
        if layout is None:
            self._heads = heads
            layout = self._layouts[window, group] = self._lay_out(window, group, is_exact)
        return layout

    def _lay_out(self, window: int | None, group: int, is_exact: bool) -> _Layout:
        """Sorts the rows of a step into decodes and prefill chunks."""
        batch = self._batch.of_group(group)
        starts = accumulate(batch.query_lens_list, initial=0)
        chunks = [
            chunk_of(batch, row, start, window, is_exact)
            for row, (start, num_queries) in enumerate(zip(starts, batch.query_lens_list, strict=False))
            if num_queries > DECODE_QUERIES
        ]
        return _Layout(self._work(window), DecodeTable(batch.block_table_RN), chunks)

    def _work(self, window: int | None) -> DecodeWork | None:
        """Returns the decodes of a window; None if there are none."""
        if window not in self._works:
            queries = queries_of(self._batch, DECODE_QUERIES)
            if isinstance(self._kernel, CpuLatentAttention):  # it gets the decodes' tokens alone
                queries = queries._replace(token=np.arange(len(queries.token)))
            work = DecodeWork(queries, window, self._batch.block_size) if len(queries.token) else None
            self._works[window] = work
            if work is not None:
                self._kernel.reserve(work, *self._heads)
        return self._works[window]
