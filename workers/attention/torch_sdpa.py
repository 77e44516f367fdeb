"""Paged attention from torch's own kernels, on any device that torch has SDPA for.

Rows with one query (decodes) are attended in groups of similar length: their blocks are gathered (whole blocks,
contiguous copies, converted where the cache holds another dtype) and SDPA runs once per group, with the query heads
that share a KV head folded into the query dim, so K and V are never repeated and each is read once. Rows with more
queries (prompt chunks) run one by one.
Shapes: T tokens, R rows of a group, N query heads, K KV heads, G = N / K, D head dim, J padded context positions.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from workers.attention.backend import AttentionStep
from workers.attention.chunks import Chunk, Gatherer, SdpaChunks, additive_mask, chunk_of, visible_span
from workers.kernels.kv_quant import KVStore, LayerKV, TorchKVStore
from workers.models.forward_batch import ForwardBatch

# What the calls of one more group cost, as tokens of padding; and how much K and V a group gathers at once, so that
# SDPA finds them in the shared cache (32 rows of 300 tokens in one group of 40 MB took twice the time of four groups).
GROUP_COST_TOKENS = 512
GROUP_BYTES = 10 * 2**20


class TorchAttention:
    """The backend. Between steps it keeps scratch memory only, so one serves one decoder on one thread."""

    name = "torch-sdpa"

    def __init__(self) -> None:
        self._store = TorchKVStore()
        self._gatherer = Gatherer(self._store)

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return _TorchStep(batch, self._store, self._gatherer)


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each. tokens_R: their places in the step, None when they are all tokens in order.

    block_ids: the blocks of all rows, one row after another, J / block_size each. bias_R11J: 0 where a position is
    seen, -inf where it is padding or outside the window; None when everything is seen.
    """

    num_rows: int
    tokens_R: torch.Tensor | None
    block_ids: torch.Tensor
    bias_R11J: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a step's rows are attended under one window."""

    groups: list[_DecodeGroup]
    chunks: list[Chunk]


class _TorchStep:
    """One step; layouts are made once per distinct window and shared by all layers."""

    def __init__(self, batch: ForwardBatch, store: KVStore, gatherer: Gatherer) -> None:
        self._batch = batch
        self._store = store
        self._gatherer = gatherer
        self._sdpa = SdpaChunks()
        self._layouts: dict[int | None, _Layout] = {}

    def forward(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        self._store.write(k_TKD, v_TKD, kv, self._batch.slot_mapping_T)
        if window not in self._layouts:
            max_blocks = max(1, GROUP_BYTES // (2 * kv.keys[0].numel() * q_TND.dtype.itemsize))
            is_exact = kv.keys.dtype is k_TKD.dtype
            self._layouts[window] = _lay_out(self._batch, window, q_TND.dtype, max_blocks, is_exact)
        layout = self._layouts[window]
        if len(layout.groups) == 1 and layout.groups[0].tokens_R is None:
            return self._attend_group(layout.groups[0], q_TND, kv, scale)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        for group in layout.groups:
            assert group.tokens_R is not None
            out_TND[group.tokens_R] = self._attend_group(group, q_TND[group.tokens_R], kv, scale)
        for chunk in layout.chunks:
            k_JKD, v_JKD = self._gatherer.context(chunk, k_TKD, v_TKD, kv)
            own = slice(chunk.start, chunk.stop)
            out_TND[own] = self._sdpa.attend(q_TND[own], k_JKD, v_JKD, scale, window)
        return out_TND

    def _attend_group(self, group: _DecodeGroup, q_RND: torch.Tensor, kv: LayerKV, scale: float) -> torch.Tensor:
        """out_RND: one SDPA over all rows; the G query heads of a KV head are its "queries", since all see the same."""
        rows, (_, num_kv_heads, head_dim) = group.num_rows, kv.keys.shape[1:]
        k_RKJD, v_RKJD = (
            blocks.view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
            for blocks in self._gatherer.blocks(kv, group.block_ids, q_RND.dtype)
        )
        q_RKGD = q_RND.reshape(rows, num_kv_heads, -1, head_dim)
        out_RKGD = F.scaled_dot_product_attention(q_RKGD, k_RKJD, v_RKJD, attn_mask=group.bias_R11J, scale=scale)
        return out_RKGD.reshape(q_RND.shape)


def _lay_out(batch: ForwardBatch, window: int | None, dtype: torch.dtype, max_blocks: int, is_exact: bool) -> _Layout:
    """Sorts the rows of a step into decode groups and prompt chunks."""
    starts = list(accumulate(batch.query_lens_list, initial=0))
    decodes = [row for row, num_queries in enumerate(batch.query_lens_list) if num_queries == 1]
    chunks = [
        chunk_of(batch, row, starts[row], window, is_exact)
        for row, num_queries in enumerate(batch.query_lens_list)
        if num_queries > 1
    ]
    spans = {row: visible_span(batch, row, window) for row in decodes}
    cost = GROUP_COST_TOKENS // batch.block_size
    row_groups = _similar_rows({row: len(span) for row, span in spans.items()}, cost, max_blocks)
    in_order = len(row_groups) == 1 and not chunks
    groups = [
        _group(batch, rows, [spans[row] for row in rows], None if in_order else starts, window, dtype)
        for rows in row_groups
    ]
    return _Layout(groups, chunks)


def _similar_rows(num_blocks: dict[int, int], group_cost: int, max_blocks: int) -> list[list[int]]:
    """Rows cut in groups by length, so that the padding of a group costs no more than another group's calls would.

    Greedy from the longest down; a group holds at most max_blocks, padding included, or one row. Within a group rows
    keep their order in the step.
    """
    groups: list[list[int]] = []
    longest = padding = 0
    for row in sorted(num_blocks, key=lambda row: -num_blocks[row]):
        padding += longest - num_blocks[row]
        if not groups or padding > group_cost or (len(groups[-1]) + 1) * longest > max_blocks:
            groups.append([])
            longest, padding = num_blocks[row], 0
        groups[-1].append(row)
    return [sorted(rows) for rows in groups]


def _group(
    batch: ForwardBatch,
    rows: list[int],
    spans: list[range],
    starts: list[int] | None,
    window: int | None,
    dtype: torch.dtype,
) -> _DecodeGroup:
    """A group's gather list and mask; `starts` None when the group is the whole step in order."""
    device, block_size = batch.block_table_RN.device, batch.block_size
    width = max(len(span) for span in spans)
    rows_R = torch.tensor(rows, device=device)
    first_R = torch.tensor([span.start for span in spans], device=device)
    column_RB = first_R[:, None] + torch.arange(width, device=device)
    table_RN = batch.block_table_RN[rows_R].long()
    block_ids = table_RN.gather(1, column_RB.clamp(max=table_RN.shape[1] - 1)).flatten()
    tokens_R = None if starts is None else torch.tensor([starts[row] for row in rows], device=device)
    seq_len_R1 = batch.seq_lens[rows_R, None].long()
    position_RJ = first_R[:, None] * block_size + torch.arange(width * block_size, device=device)
    seen_RJ = position_RJ < seq_len_R1
    if window is not None:
        seen_RJ &= position_RJ >= seq_len_R1 - window
    if all(batch.seq_lens_list[row] == width * block_size for row in rows) and window is None:
        return _DecodeGroup(len(rows), tokens_R, block_ids, None)
    return _DecodeGroup(len(rows), tokens_R, block_ids, additive_mask(seen_RJ, dtype)[:, None, None])
