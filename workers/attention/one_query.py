"""Paged attention of --batch-invariant: each token is a row of its own, which reads its context from the cache.

The context is split at multiples of 128 positions from its first visible one on, by nothing but the token's own
position, and the parts are merged in order. So a token's result depends neither on the chunk that it is computed in nor
on other rows. The decode kernel computes it (kernels/cpu/cpu_decode_attention.py), in long prompts too, where it reads
the context once for each token: see docs/performance.md for what that costs. Shapes as in backend.py.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate

import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latent import LatentHeads
from tandem.workers.kernels.cpu.cpu_decode_attention import PARTITION_TOKENS, CpuDecodeAttention, DecodeWork, Rows
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.latents.cpu_latent_attention import CpuLatentAttention
from tandem.workers.models.spec.arch import AttentionParams

MOST_PARTS = 1024
"""Parts of contexts whose sums are held at a time: some 17 MB with 32 heads of 128 elements."""


class OneQueryAttention:
    """The backend, of heads or of latents by its kernel. It keeps scratch memory between steps, so one instance serves
    one decoder on one thread."""

    name = "cpu-one-query"

    def __init__(self, kernel: CpuDecodeAttention | CpuLatentAttention) -> None:
        self._kernel = kernel

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return _Step(batch, self._kernel, MOST_PARTS)

    def replay_key(self, batch: ForwardBatch, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        """The kernel reads rows and lengths at each call: all decodes have one key."""
        return () if max(batch.query_lens_list) <= DECODE_QUERIES else None

    def prepare_replay(self, batch: ForwardBatch, num_tokens: int, scratch_block: int) -> ReplayableStep:
        assert num_tokens == batch.num_tokens, "a step on CPU is not padded"
        return _Step(batch, self._kernel, None)


class _Step:
    """One step; work is laid out once per distinct window and shared by all layers. most_parts: of one call; None: one
    call for the whole step, as a captured one must have."""

    def __init__(
        self, batch: ForwardBatch, kernel: CpuDecodeAttention | CpuLatentAttention, most_parts: int | None
    ) -> None:
        self._batch = batch
        self._kernel = kernel
        self._most_parts = most_parts
        self._works: dict[int | None, list[DecodeWork]] = {}
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
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype)
        for work in self._works_of(params.window, q_TND.shape[1:]):
            kernel.attend(q_TND, kv, out_TND, work, params)
        return out_TND

    def attend_latent(
        self,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        """Every token absorbed, in prompts too."""
        kernel, spec = self._kernel, heads.spec
        assert isinstance(kernel, CpuLatentAttention), "a backend of heads"
        works = self._works_of(params.window, (q_TND.shape[1], spec.head_dim))
        return kernel.attend(q_TND, kv, works, params, spec, heads.of_heads())

    def _works_of(self, window: int | None, heads: Sequence[int]) -> list[DecodeWork]:
        """heads: how many there are and how wide they are in the cache."""
        works = self._works.get(window)
        if works is None:
            batch, self._heads = self._batch, heads
            pieces = _pieces(_queries(batch, window), self._most_parts)
            works = [DecodeWork(rows, batch.block_table_RN, batch.block_size) for rows in pieces]
            self._works[window] = works
            for work in works:
                self._kernel.reserve(work, *heads)
        return works

    def set_batch(self, batch: ForwardBatch) -> None:
        self._batch = batch
        for window, (work,) in self._works.items():
            work.set_rows(_queries(batch, window), batch.block_table_RN, batch.block_size)
            self._kernel.reserve(work, *self._heads)


def _queries(batch: ForwardBatch, window: int | None) -> Rows:
    """Returns every token of the step as a row: its row in the block table, its place, its first visible position and
    the one behind its own."""
    starts = accumulate(batch.query_lens_list, initial=0)
    rows = zip(starts, batch.query_lens_list, batch.seq_lens_list, strict=False)
    return [
        (row, start + query, 0 if window is None else max(0, end - window), end)
        for row, (start, num_queries, seq_len) in enumerate(rows)
        for query, end in enumerate(range(seq_len - num_queries + 1, seq_len + 1))
    ]


def _pieces(rows: Rows, most_parts: int | None) -> Iterator[Rows]:
    """Yields runs of rows that have most_parts parts of contexts together, or are one row."""
    if most_parts is None:
        yield rows
        return
    begin = parts = 0
    for index, (_, _, first, last) in enumerate(rows):
        own = (last - first) // PARTITION_TOKENS + 2  # at most
        if begin < index and parts + own > most_parts:
            yield rows[begin:index]
            begin, parts = index, 0
        parts += own
    yield rows[begin:]
