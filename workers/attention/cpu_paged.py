"""Paged attention on CPU: a compiled decode kernel that reads the cache in place; matmuls and a compiled softmax for
prefill. Both compute any AttentionParams.

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
from tandem.workers.attention.latent import LatentHeads
from tandem.workers.attention.one_query import queries_of
from tandem.workers.attention.torch_sdpa import TorchStep
from tandem.workers.kernels.cpu.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.cpu_decode_attention import CpuDecodeAttention, DecodeTable, DecodeWork
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class CpuAttention:
    """The backend. It keeps scratch memory between steps, so one instance serves one decoder on one thread."""

    name = "cpu-paged"

    def __init__(self, kernel: CpuDecodeAttention, store: KVStore, chunk_kernel: CpuChunkAttention) -> None:
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
        kernel: CpuDecodeAttention,
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
        self._of_latents: TorchStep | None = None

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        key = params.window, kv.group
        layout = self._layouts.get(key)
        if layout is None:
            self._heads = q_TND.shape[1:]
            layout = self._layouts[key] = self._lay_out(*key, kv.keys.dtype is k_TKD.dtype)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype)
        if layout.decodes is not None:
            self._kernel.attend(q_TND, kv, out_TND, layout.decodes, layout.table, params)
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
        if self._of_latents is None:
            self._of_latents = TorchStep(self._batch, self._gatherer, False, self._chunk_attention)
        return self._of_latents.attend_latent(q_TND, latents_T1E, kv, params, heads)

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
            work = DecodeWork(queries, window, self._batch.block_size) if len(queries.token) else None
            self._works[window] = work
            if work is not None:
                self._kernel.reserve(work, *self._heads)
        return self._works[window]
