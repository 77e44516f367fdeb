"""Attention over latents on CPU: a compiled kernel that absorbs and reads the cache in place; latent_chunks.py has the
chunks.

Chosen by workers/platforms/cpu.py where the kernels can be compiled; torch_latents.py is the twin. Shapes as in
backend.py.
"""

from collections.abc import Hashable

import torch

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.attention.chunks import Gatherer
from tandem.workers.attention.cpu_rows import MOST_PARTS, QueryRows, decode_key
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.latents.latent_backend import LatentStep
from tandem.workers.attention.latents.latent_chunks import LatentChunks
from tandem.workers.attention.latents.latent_heads import LatentHeads
from tandem.workers.attention.row_layout import RowLayouts
from tandem.workers.kernels.cpu.attention.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.attention.cpu_latent_attention import CpuLatentAttention
from tandem.workers.kernels.kv_store import KVStore, LayerKV
from tandem.workers.models.spec.arch import AttentionParams


class CpuLatents:
    """The backend. chunk_kernel: None for --batch-invariant, which absorbs every token, in prompts too (cpu_paged.py).
    It keeps scratch memory between steps, so one instance serves one decoder on one thread."""

    def __init__(self, kernel: CpuLatentAttention, store: KVStore, chunk_kernel: CpuChunkAttention | None) -> None:
        self.name = "cpu-one-query" if chunk_kernel is None else "cpu-paged"
        self._kernel = kernel
        self._chunks = None if chunk_kernel is None else LatentChunks(Gatherer(store), chunk_kernel, keeps_scores=False)

    def prepare(self, batch: ForwardBatch) -> LatentStep:
        if self._chunks is None:
            return _LatentQueries(self._kernel, QueryRows(batch, self._kernel, most_parts=MOST_PARTS))
        if decode_key(max(batch.query_lens_list)) is None:
            return _LatentRows(batch, self._kernel, self._chunks)
        return _LatentQueries(self._kernel, QueryRows(batch, self._kernel))

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return decode_key(shape.most_queries)

    def prepare_replay(self, batch: ForwardBatch) -> "_LatentQueries":
        return _LatentQueries(self._kernel, QueryRows(batch, self._kernel))


class _LatentQueries:
    """A step all of whose queries the kernel absorbs."""

    def __init__(self, kernel: CpuLatentAttention, rows: QueryRows) -> None:
        self._kernel = kernel
        self._rows = rows

    def attend_latent(
        self, q_TND: torch.Tensor, latents_T1E: torch.Tensor, kv: LayerKV, params: AttentionParams, heads: LatentHeads
    ) -> torch.Tensor:
        works = self._rows.works(params.window, q_TND.shape[1], heads.spec.head_dim)
        return self._kernel.attend(q_TND, kv, works, self._rows.table(kv.group), params, heads.spec, heads.of_heads())

    def set_batch(self, batch: ForwardBatch) -> None:
        self._rows.set_batch(batch)


class _LatentRows:
    """A step with chunks, and perhaps decodes, whose queries alone are absorbed for the kernel."""

    def __init__(self, batch: ForwardBatch, kernel: CpuLatentAttention, chunks: LatentChunks) -> None:
        rows = QueryRows(batch, kernel, DECODE_QUERIES, is_packed=True)
        self._tokens_D = torch.from_numpy(rows.tokens())
        self._decodes = _LatentQueries(kernel, rows)
        self._layouts = RowLayouts(batch, DECODE_QUERIES)
        self._chunks = chunks

    def attend_latent(
        self, q_TND: torch.Tensor, latents_T1E: torch.Tensor, kv: LayerKV, params: AttentionParams, heads: LatentHeads
    ) -> torch.Tensor:
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], heads.spec.v_dim))
        tokens_D = self._tokens_D
        if len(tokens_D):
            out_TNV[tokens_D] = self._decodes.attend_latent(q_TND[tokens_D], latents_T1E, kv, params, heads)
        for chunk in self._layouts.of(params.window, kv, q_TND.dtype).chunks:
            own = slice(chunk.start, chunk.stop)
            out_TNV[own] = self._chunks.attend(chunk, q_TND, latents_T1E, kv, params, heads)
        return out_TNV
