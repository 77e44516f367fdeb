"""Paged attention of --batch-invariant: each token is a row of its own, which reads its context from the cache.

The context is split at multiples of 128 positions from its first visible one on, by nothing but the token's own
position, and the parts are merged in order. So a token's result depends neither on the chunk that it is computed in nor
on other rows. The decode kernel computes it (kernels/cpu/cpu_decode_attention.py), in long prompts too, where it reads
the context once for each token: see docs/performance.md for what that costs. Shapes as in backend.py.
"""

import sys
from collections.abc import Hashable, Iterator, Sequence

import numpy as np
import torch

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep, ReplayableStep
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.latent import LatentHeads
from tandem.workers.kernels.cpu.cpu_decode_attention import (
    PARTITION_TOKENS,
    CpuDecodeAttention,
    DecodeTable,
    DecodeWork,
    Queries,
)
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
        self._tables: dict[int, DecodeTable] = {}
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
        table = self._table_of(kv.group)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype)
        for work in self._works_of(params.window, q_TND.shape[1:]):
            kernel.attend(q_TND, kv, out_TND, work, table, params)
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
        return kernel.attend(q_TND, kv, works, self._table_of(kv.group), params, spec, heads.of_heads())

    def _works_of(self, window: int | None, heads: Sequence[int]) -> list[DecodeWork]:
        """heads: how many there are and how wide they are in the cache."""
        works = self._works.get(window)
        if works is None:
            batch, self._heads = self._batch, heads
            pieces = _pieces(queries_of(batch), window, self._most_parts)
            works = [DecodeWork(piece, window, batch.block_size) for piece in pieces]
            self._works[window] = works
            for work in works:
                self._kernel.reserve(work, *heads)
        return works

    def _table_of(self, group: int) -> DecodeTable:
        if group not in self._tables:
            self._tables[group] = DecodeTable(self._batch.block_table(group))
        return self._tables[group]

    def set_batch(self, batch: ForwardBatch) -> None:
        self._batch = batch
        queries = queries_of(batch)
        for (work,) in self._works.values():
            work.set_queries(queries)
            self._kernel.reserve(work, *self._heads)
        for group, table in self._tables.items():
            table.set_table(batch.block_table(group))


def queries_of(batch: ForwardBatch, most: int = sys.maxsize) -> Queries:
    """Returns the tokens of the step's rows with at most so many of them: the context of one ends where the next
    token's begins."""
    lens_R, ends_R = np.array(batch.query_lens_list), np.array(batch.seq_lens_list)
    row_T = np.arange(len(lens_R)).repeat(lens_R)
    token = np.flatnonzero(lens_R[row_T] <= most)
    row = row_T[token]
    return Queries(row, token, (ends_R - lens_R.cumsum())[row] + token + 1)


def _pieces(queries: Queries, window: int | None, most_parts: int | None) -> Iterator[Queries]:
    """Yields runs of queries that have most_parts parts of contexts together, or are one."""
    begin = parts = 0
    if most_parts is not None:
        seen = queries.end if window is None else np.minimum(queries.end, window)
        for index, own in enumerate((seen // PARTITION_TOKENS + 2).tolist()):  # at most
            if begin < index and parts + own > most_parts:
                yield Queries(*(each[begin:index] for each in queries))
                begin, parts = index, 0
            parts += own
    yield Queries(*(each[begin:] for each in queries))
