"""Paged attention on CPU: a compiled decode kernel that reads the cache in place; matmuls and a compiled softmax for
prefill. Both compute any AttentionParams. For latents there is a decode kernel of their own; their chunks are those of
latent.py.

Chosen by workers/platforms/cpu.py where the kernels can be compiled; torch_sdpa.py is the twin that needs
no compiler. The cache may have any dtype that kernel and store were compiled for. Shapes as in backend.py.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep, ReplayableStep
from tandem.workers.attention.chunks import Chunk, ChunkAttention, Gatherer, chunk_of
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latent import LatentChunks, LatentHeads
from tandem.workers.kernels.cpu.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.cpu_decode_attention import CpuDecodeAttention, DecodeWork, Rows
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
    """The grouping of a step's rows under one window. tokens: of the decodes, in order."""

    decodes: DecodeWork | None
    chunks: list[Chunk]
    tokens: list[int]


class _CpuStep:
    """One step; layouts are made once per distinct window and shared by all layers."""

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
        self._layouts: dict[int | None, _Layout] = {}
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
        layout = self._layout_of(params.window, q_TND.shape[1:], kv.keys.dtype is k_TKD.dtype)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype)
        if layout.decodes is not None:
            kernel.attend(q_TND, kv, out_TND, layout.decodes, params)
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
        layout = self._layout_of(None, (q_TND.shape[1], spec.head_dim), kv.keys.dtype is q_TND.dtype)
        if layout.decodes is None or layout.chunks:
            return self._with_chunks(layout, q_TND, latents_T1E, kv, params, heads)
        return kernel.attend(q_TND, kv, [layout.decodes], params, spec, heads.of_heads())

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
            tokens_D = torch.tensor(layout.tokens)
            q_DND, weight_NXL = q_TND[tokens_D], heads.of_heads()
            out_TNV[tokens_D] = self._kernel.attend(q_DND, kv, [layout.decodes], params, heads.spec, weight_NXL)
        chunks = LatentChunks(self._gatherer, self._chunk_attention, keeps_scores=False)
        for chunk in layout.chunks:
            out_TNV[chunk.start : chunk.stop] = chunks.attend(chunk, q_TND, latents_T1E, kv, params, heads)
        return out_TNV

    def set_batch(self, batch: ForwardBatch) -> None:
        assert not any(layout.chunks for layout in self._layouts.values())
        self._batch = batch
        for window, layout in self._layouts.items():
            if layout.decodes is not None:
                layout.decodes.set_rows(_decodes(batch, window), batch.block_table_RN, batch.block_size)
                self._reserve(layout)

    def _layout_of(self, window: int | None, heads: Sequence[int], is_exact: bool) -> _Layout:
        """heads: how many there are and how wide they are in the cache."""
        layout = self._layouts.get(window)
        if layout is None:
            layout = self._layouts[window] = self._lay_out(window, is_exact)
            self._heads = heads
            self._reserve(layout)
        return layout

    def _reserve(self, layout: _Layout) -> None:
        if layout.decodes is not None:
            self._kernel.reserve(layout.decodes, *self._heads)

    def _lay_out(self, window: int | None, is_exact: bool) -> _Layout:
        """Sorts the rows of a step into decodes and prefill chunks."""
        batch = self._batch
        starts = accumulate(batch.query_lens_list, initial=0)
        chunks = [
            chunk_of(batch, row, start, window, is_exact)
            for row, (start, num_queries) in enumerate(zip(starts, batch.query_lens_list, strict=False))
            if num_queries > DECODE_QUERIES
        ]
        decodes = _decodes(batch, window)
        tokens = [token for _, token, _, _ in decodes]
        if isinstance(self._kernel, CpuLatentAttention):  # it gets the decodes' tokens alone
            decodes = [(row, place, first, last) for place, (row, _, first, last) in enumerate(decodes)]
        work = DecodeWork(decodes, batch.block_table_RN, batch.block_size) if decodes else None
        return _Layout(work, chunks, tokens)


def _decodes(batch: ForwardBatch, window: int | None) -> Rows:
    """Returns the queries of rows with few of them, each as a row of its own: the context of one ends where the next
    token's begins."""
    starts = accumulate(batch.query_lens_list, initial=0)
    rows = zip(starts, batch.query_lens_list, batch.seq_lens_list, strict=False)
    return [
        (row, start + query, 0 if window is None else max(0, end - window), end)
        for row, (start, num_queries, seq_len) in enumerate(rows)
        if num_queries <= DECODE_QUERIES
        for query, end in enumerate(range(seq_len - num_queries + 1, seq_len + 1))
    ]
