"""The rows of a step as compiled CPU kernels read them: queries to attend for one by one, and block tables.

Shared by the backends of heads and of latents. Captured calls follow set_batch.
"""

import sys
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import (
    PARTITION_TOKENS,
    CpuDecodeAttention,
    DecodeTable,
    DecodeWork,
    Ints,
    Queries,
)

if TYPE_CHECKING:
    from tandem.workers.kernels.cpu.attention.cpu_latent_attention import CpuLatentAttention

MOST_PARTS = 1024
"""Parts of contexts whose sums are held at a time: some 17 MB with 32 heads of 128 elements."""


def decode_key(most_queries: int) -> Hashable | None:
    """Return the replay_key of a step, by the most queries of a row: the kernels read rows and lengths at each call, so
    all decodes have one. None for a step with chunks."""
    return () if most_queries <= DECODE_QUERIES else None


class QueryRows:
    """The queries of rows with at most most_queries of them, made once for each window, and block tables, once for each
    group of layers. most_parts: of contexts in one call of the kernel; None: one call for all, as a captured one must
    be. is_packed: the kernel gets the tokens of these rows alone."""

    def __init__(
        self,
        batch: ForwardBatch,
        kernel: "CpuDecodeAttention | CpuLatentAttention",
        most_queries: int = sys.maxsize,
        *,
        most_parts: int | None = None,
        is_packed: bool = False,
    ) -> None:
        self._batch = batch
        self._kernel = kernel
        self._most_queries, self._most_parts, self._is_packed = most_queries, most_parts, is_packed
        self._works: dict[int | None, list[DecodeWork]] = {}
        self._tables: dict[int, DecodeTable] = {}
        self._heads = (0, 0)

    def works(self, window: int | None, num_heads: int, width: int) -> list[DecodeWork]:
        """Return the calls' work, for which memory is reserved; none without such rows. width: of a head in the
        cache."""
        works = self._works.get(window)
        if works is None:
            self._heads = num_heads, width
            queries = self._queries()
            pieces = _pieces(queries, window, self._most_parts) if len(queries.token) else ()
            works = [DecodeWork(piece, window, self._batch.block_size, self._kernel.together) for piece in pieces]
            self._works[window] = works
            for work in works:
                self._kernel.reserve(work, num_heads, width)
        return works

    def table(self, group: int) -> DecodeTable:
        """Return the block table of a group of layers."""
        table = self._tables.get(group)
        if table is None:
            table = self._tables[group] = DecodeTable(self._batch.block_table(group))
        return table

    def tokens(self) -> Ints:
        """Return the places of the rows' tokens in the step."""
        lens_R = np.array(self._batch.query_lens_list)
        return np.flatnonzero(lens_R.repeat(lens_R) <= self._most_queries)

    def _queries(self) -> Queries:
        """Return the rows' tokens: the context of one ends where the next token's begins."""
        lens_R, ends_R = np.array(self._batch.query_lens_list), np.array(self._batch.seq_lens_list)
        token = self.tokens()
        row = np.arange(len(lens_R)).repeat(lens_R)[token]
        end = (ends_R - lens_R.cumsum())[row] + token + 1
        return Queries(row, np.arange(len(token)) if self._is_packed else token, end)

    def set_batch(self, batch: ForwardBatch) -> None:
        """Point the works and tables that there are at another batch, whose rows are all taken query by query."""
        self._batch = batch
        queries = self._queries()
        for (work,) in self._works.values():
            work.set_queries(queries)
            self._kernel.reserve(work, *self._heads)
        for group, table in self._tables.items():
            table.set_table(batch.block_table(group))


def _pieces(queries: Queries, window: int | None, most_parts: int | None) -> Iterator[Queries]:
    """Yield runs of queries that have most_parts parts of contexts together, or are one."""
    begin = parts = 0
    if most_parts is not None:
        seen = queries.end if window is None else np.minimum(queries.end, window)
        for index, own in enumerate((seen // PARTITION_TOKENS + 2).tolist()):  # at most
            if begin < index and parts + own > most_parts:
                yield Queries(*(each[begin:index] for each in queries))
                begin, parts = index, 0
            parts += own
    yield Queries(*(each[begin:] for each in queries))
