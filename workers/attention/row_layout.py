"""The layout of a step's rows for the layers of one group with one window: rows whose queries are taken one by one, and
chunks.

All backends but Triton's, which sorts nothing, ask RowLayouts once per layer. T tokens of the step.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.kv_store import LayerKV


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with several queries, tokens start:stop of the step.

    `block_ids`: the blocks that it attends to, the first context_len of their slots; None when its context is only its
    own tokens. before: the number of positions ahead of its first token, int64 [] on the device, where the host does
    not know it: then context_len is the most. None: context_len less the chunk's tokens.
    """

    start: int
    stop: int
    block_ids: torch.Tensor | None
    context_len: int
    before: torch.Tensor | None = None


class RowLayout(NamedTuple):
    """The rows of a step. decodes: indices of rows whose queries are taken one by one; chunks: all others."""

    decodes: list[int]
    chunks: list[Chunk]


class RowLayouts:
    """The layouts of one step, made once for each window and group of layers. most_queries: of a decode; most_blocks:
    that a decode may attend to, None for any number. Rows whose length the host does not know are chunks."""

    def __init__(self, batch: ForwardBatch, most_queries: int, most_blocks: int | None = None) -> None:
        self._batch = batch
        self._most_queries, self._most_blocks = most_queries, most_blocks
        self._made: dict[tuple[int | None, int], RowLayout] = {}

    def of(self, window: int | None, kv: LayerKV, dtype: torch.dtype) -> RowLayout:
        """Return the layout for a layer's cache and queries of `dtype`."""
        key = window, kv.group
        if key not in self._made:
            self._made[key] = self._lay_out(window, self._batch.of_group(kv.group), kv.keys.dtype is dtype)
        return self._made[key]

    def _lay_out(self, window: int | None, batch: ForwardBatch, is_exact: bool) -> RowLayout:
        layout = RowLayout([], [])
        starts = accumulate(batch.query_lens_list, initial=0)
        for row, (start, _) in enumerate(zip(starts, batch.query_lens_list, strict=False)):
            if self._is_decode(batch, row, window):
                layout.decodes.append(row)
            else:
                layout.chunks.append(chunk_of(batch, row, start, window, is_exact))
        return layout

    def _is_decode(self, batch: ForwardBatch, row: int, window: int | None) -> bool:
        if batch.query_lens_list[row] > self._most_queries or spare_len(batch, row):
            return False
        return self._most_blocks is None or len(visible_span(batch, row, window)) <= self._most_blocks


def spare_len(batch: ForwardBatch, row: int) -> int:
    """Return by how much a row's length may be less than the host's."""
    return 0 if batch.spare_lens_list is None else batch.spare_lens_list[row]


def visible_span(batch: ForwardBatch, row: int, window: int | None) -> range:
    """Return the indices into the row's block table that its first query, and all later ones, may attend to."""
    seq_len, num_queries = batch.seq_lens_list[row], batch.query_lens_list[row]
    least = seq_len - spare_len(batch, row)
    first_seen = 0 if window is None else max(0, least - num_queries - window + 1)
    return range(first_seen // batch.block_size, -(-seq_len // batch.block_size))


def chunk_of(batch: ForwardBatch, row: int, start: int, window: int | None, is_exact: bool) -> Chunk:
    """Return the chunk of a row that starts at token `start` of the step.

    is_exact: the cache stores K and V in the step's own dtype, unchanged.
    """
    seq_len, num_queries = batch.seq_lens_list[row], batch.query_lens_list[row]
    if is_exact and seq_len == num_queries:
        return Chunk(start, start + num_queries, None, seq_len)
    span = visible_span(batch, row, window)
    block_ids = batch.block_table_RN[row, span.start : span.stop].long()
    hidden = span.start * batch.block_size
    before = batch.positions_T[start] - hidden if spare_len(batch, row) else None
    return Chunk(start, start + num_queries, block_ids, seq_len - hidden, before)
