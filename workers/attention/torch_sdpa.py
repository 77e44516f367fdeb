"""Paged attention by torch's own SDPA, on any device that has it.

Rows with one query (decodes) are attended in groups of similar length: their blocks are gathered (whole blocks,
contiguous copies, converted where the cache has another dtype) and SDPA runs once per group. Query heads that share a
KV head are folded into the query dim, so K and V are never repeated and each is read once. Prefill chunks run one by
one. T tokens, R rows of a group, N query heads, K KV heads, G = N / K, D head dim, J padded context positions.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from tandem.workers.attention.backend import DECODE_QUERIES, AttentionStep, ReplayableStep
from tandem.workers.attention.chunks import (
    Chunk,
    Gatherer,
    SdpaChunks,
    additive_mask,
    chunk_of,
    spare_len,
    visible_span,
)
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.general import GeneralAttention
from tandem.workers.attention.latent import LatentChunks, LatentHeads, attend_absorbed
from tandem.workers.attention.padded_decode import PaddedDecode, padded_blocks, padded_width
from tandem.workers.attention.pieces import attend_in_pieces, context_pieces, heads_that_fit, piece_blocks
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore
from tandem.workers.models.spec.arch import AttentionParams

# The cost of one more group's calls, as tokens of padding; and the bytes of K and V that a group gathers at once, so
# that SDPA finds them in the shared cache (32 rows of 300 tokens in one group of 40 MB took twice the time of four).
GROUP_COST_TOKENS = 512
GROUP_BYTES = 10 * 2**20


class TorchAttention:
    """The backend. is_bounded: its memory does not grow with the
    context (pieces.py). replays: decode steps may be padded and replayed (padded_decode.py). It keeps scratch memory
    between steps, so one instance serves one decoder on one thread."""

    name = "torch-sdpa"

    def __init__(self, *, is_bounded: bool = False, replays: bool = False) -> None:
        self._replays = replays
        self._is_bounded = is_bounded
        self._gatherer = Gatherer(TorchKVStore())

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return TorchStep(batch, self._gatherer, self._is_bounded)

    def replay_key(self, batch: ForwardBatch, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        if not self._replays or max(batch.query_lens_list) > DECODE_QUERIES:
            return None
        return padded_width(batch, kv, dtype)

    def prepare_replay(self, batch: ForwardBatch, num_tokens: int, scratch_block: int) -> ReplayableStep:
        width = padded_blocks(batch)
        return PaddedDecode(batch, num_tokens, width, scratch_block, TorchKVStore())


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Rows with one query each. tokens_R: their indices in the step, None when they are all tokens in order.

    block_ids: the blocks of all rows, one row after another, J / block_size each. bias_R11J: 0 for visible positions,
    -inf for padding and positions outside the window; None when all are visible.
    """

    num_rows: int
    tokens_R: torch.Tensor | None
    block_ids: torch.Tensor
    bias_R11J: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """The grouping of a step's rows under one window."""

    groups: list[_DecodeGroup]
    chunks: list[Chunk]


class TorchStep:
    """One step; layouts are made once for each group of layers and window."""

    def __init__(self, batch: ForwardBatch, gatherer: Gatherer, is_bounded: bool) -> None:
        self._batch = batch
        self._is_bounded = is_bounded
        self._gatherer = gatherer
        self._sdpa = SdpaChunks()
        self._of_latents = LatentChunks(gatherer, self._sdpa, keeps_scores=is_bounded)
        self._general = GeneralAttention(batch, gatherer)
        self._layouts: dict[tuple[int | None, int], _Layout] = {}

    def attend(
        self,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        if not params.is_plain:
            return self._general.attend(q_TND, k_TKD, v_TKD, kv, params)
        window, scale = params.window, params.scale
        layout = self._layout_of(window, kv, q_TND.dtype)
        if len(layout.groups) == 1 and layout.groups[0].tokens_R is None:
            return self._attend_group(layout.groups[0], q_TND, kv, scale)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        for group in layout.groups:
            assert group.tokens_R is not None
            out_TND[group.tokens_R] = self._attend_group(group, q_TND[group.tokens_R], kv, scale)
        for chunk in layout.chunks:
            own = slice(chunk.start, chunk.stop)
            in_pieces = self._is_bounded and not self._fits(chunk, q_TND, kv, window)
            if in_pieces or chunk.before is not None:
                pieces = context_pieces(self._gatherer, chunk, k_TKD, v_TKD, kv)
                out_TND[own] = attend_in_pieces(q_TND[own], pieces, chunk.context_len, params, chunk.before)
            else:
                k_JKD, v_JKD = self._gatherer.context(chunk, k_TKD, v_TKD, kv)
                out_TND[own] = self._sdpa.attend(q_TND[own], k_JKD, v_JKD, params)
        return out_TND

    def attend_latent(
        self,
        q_TND: torch.Tensor,
        latents_T1E: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
        heads: LatentHeads,
    ) -> torch.Tensor:
        """Decodes in groups, absorbed; chunks one by one."""
        layout = self._layout_of(None, kv, q_TND.dtype)
        out_TNV = q_TND.new_empty((*q_TND.shape[:2], heads.spec.v_dim))
        for group in layout.groups:
            tokens = slice(None) if group.tokens_R is None else group.tokens_R
            latents_BS1E = self._gatherer.keys(kv, group.block_ids, q_TND.dtype)
            latents_RJE = latents_BS1E.view(group.num_rows, -1, heads.spec.head_dim)
            mask_R1J = None if group.bias_R11J is None else group.bias_R11J[:, 0]
            out_RNL = attend_absorbed(heads.absorb(q_TND[tokens]), latents_RJE, mask_R1J, params, heads.spec)
            out_TNV[tokens] = heads.release(out_RNL)
        for chunk in layout.chunks:
            own = slice(chunk.start, chunk.stop)
            out_TNV[own] = self._of_latents.attend(chunk, q_TND, latents_T1E, kv, params, heads)
        return out_TNV

    def _layout_of(self, window: int | None, kv: LayerKV, dtype: torch.dtype) -> "_Layout":
        key = window, kv.group
        if key not in self._layouts:
            max_blocks = max(1, GROUP_BYTES // (2 * kv.keys[0].numel() * dtype.itemsize))
            is_exact = kv.keys.dtype is dtype
            longest = piece_blocks(kv, dtype) if self._is_bounded else None
            batch = self._batch.of_group(kv.group)
            self._layouts[key] = _lay_out(batch, window, dtype, max_blocks, is_exact, longest)
        return self._layouts[key]

    def _fits(self, chunk: Chunk, q_TND: torch.Tensor, kv: LayerKV, window: int | None) -> bool:
        """Whether SDPA needs no mask, or both its scores, should it keep them, and the gather stay within bounds."""
        tokens = chunk.stop - chunk.start
        if chunk.block_ids is None and (window is None or window >= chunk.context_len):
            return True
        blocks = 0 if chunk.block_ids is None else len(chunk.block_ids)
        return blocks <= piece_blocks(kv, q_TND.dtype) and q_TND.shape[1] <= heads_that_fit(tokens, chunk.context_len)

    def _attend_group(self, group: _DecodeGroup, q_RND: torch.Tensor, kv: LayerKV, scale: float) -> torch.Tensor:
        """Returns out_RND from one SDPA over all rows: the G query heads of a KV head act as its queries, with equal
        masks."""
        rows, (_, num_kv_heads, head_dim) = group.num_rows, kv.keys.shape[1:]
        k_RKJD, v_RKJD = (
            blocks.view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
            for blocks in self._gatherer.blocks(kv, group.block_ids, q_RND.dtype)
        )
        q_RKGD = q_RND.reshape(rows, num_kv_heads, -1, head_dim)
        out_RKGD = F.scaled_dot_product_attention(q_RKGD, k_RKJD, v_RKJD, attn_mask=group.bias_R11J, scale=scale)
        return out_RKGD.reshape(q_RND.shape)


def _lay_out(
    batch: ForwardBatch,
    window: int | None,
    dtype: torch.dtype,
    max_blocks: int,
    is_exact: bool,
    longest: int | None,
) -> _Layout:
    """Sorts the rows of a step into decode groups and prefill chunks. Decodes of more than `longest` blocks are
    chunks, as are rows whose length the host does not know."""
    starts = list(accumulate(batch.query_lens_list, initial=0))
    decodes = [
        row for row, num_queries in enumerate(batch.query_lens_list) if num_queries == 1 and not spare_len(batch, row)
    ]
    spans = {row: visible_span(batch, row, window) for row in decodes}
    if longest is not None:
        spans = {row: span for row, span in spans.items() if len(span) <= longest}
    chunks = [
        chunk_of(batch, row, starts[row], window, is_exact)
        for row in range(len(batch.query_lens_list))
        if row not in spans
    ]
    cost = GROUP_COST_TOKENS // batch.block_size
    row_groups = _similar_rows({row: len(span) for row, span in spans.items()}, cost, max_blocks)
    in_order = len(row_groups) == 1 and not chunks
    groups = [_group(batch, rows, [spans[row] for row in rows], in_order, window, dtype) for rows in row_groups]
    return _Layout(groups, chunks)


def _similar_rows(num_blocks: dict[int, int], group_cost: int, max_blocks: int) -> list[list[int]]:
    """Groups rows by length, so that a group's padding costs no more than the calls of one more group would.

    Greedy from the longest row down; a group has at most max_blocks blocks, padding included, or one row. Within a
    group rows keep their order in the step.
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
    batch: ForwardBatch, rows: list[int], spans: list[range], in_order: bool, window: int | None, dtype: torch.dtype
) -> _DecodeGroup:
    """Returns a group's gather list and mask, made on the device: nothing is copied there. in_order: the group is the
    whole step in order."""
    device, block_size = batch.block_table_RN.device, batch.block_size
    width = max(len(span) for span in spans)
    rows_R = _places(rows, device)
    seq_len_R1 = batch.seq_lens[rows_R, None].long()
    first_R1 = torch.zeros_like(seq_len_R1)
    if window is not None:
        first_R1 = (seq_len_R1 - window).clamp_(min=0) // block_size
    column_RB = first_R1 + torch.arange(width, device=device)
    table_RN = batch.block_table_RN[rows_R].long()
    block_ids = table_RN.gather(1, column_RB.clamp(max=table_RN.shape[1] - 1)).flatten()
    tokens_R = None if in_order else batch.query_starts[rows_R].long()
    position_RJ = first_R1 * block_size + torch.arange(width * block_size, device=device)
    seen_RJ = position_RJ < seq_len_R1
    if window is not None:
        seen_RJ &= position_RJ >= seq_len_R1 - window
    if all(batch.seq_lens_list[row] == width * block_size for row in rows) and window is None:
        return _DecodeGroup(len(rows), tokens_R, block_ids, None)
    return _DecodeGroup(len(rows), tokens_R, block_ids, additive_mask(seen_RJ, dtype)[:, None, None])


def _places(rows: list[int], device: torch.device) -> torch.Tensor:
    """Returns ascending numbers as an int64 tensor, put together of runs: a list would have to be copied."""
    runs, start = [], 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            runs.append(torch.arange(rows[start], rows[place - 1] + 1, device=device))
            start = place
    return runs[0] if len(runs) == 1 else torch.cat(runs)
