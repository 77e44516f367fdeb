"""Paged attention by torch's own SDPA, on any device that has it.

Rows with one query (decodes) are attended in groups of similar length: their blocks are gathered (whole blocks,
contiguous copies, converted where the cache has another dtype) and SDPA runs once per group. Query heads that share a
KV head are folded into the query dim, so K and V are never repeated and each is read once. Prefill chunks run one by
one. T tokens, R rows of a group, N query heads, K KV heads, G = N / K, D head dim, J padded context positions.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tandem.workers.attention.backend import AttentionStep
from tandem.workers.attention.chunks import Gatherer, SdpaChunks
from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.attention.general import GeneralAttention
from tandem.workers.attention.padded_decode import PaddedDecode, padded_width
from tandem.workers.attention.pieces import attend_in_pieces, context_pieces, heads_that_fit, piece_blocks
from tandem.workers.attention.row_layout import Chunk, RowLayout, RowLayouts, visible_span
from tandem.workers.attention.softmax import as_mask, seen_through
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore
from tandem.workers.models.spec.arch import AttentionParams

# The cost of one more group's calls, as tokens of padding; and the bytes of K and V that a group gathers at once, so
# that SDPA finds them in the shared cache (32 rows of 300 tokens in one group of 40 MB took twice the time of four).
GROUP_COST_TOKENS = 512
GROUP_BYTES = 10 * 2**20


class TorchAttention:
    """The backend, of heads. is_bounded: its memory does not grow with the context (pieces.py). replays: decode steps
    may be padded and replayed (padded_decode.py). It keeps scratch memory between steps, so one instance serves one
    decoder on one thread."""

    name = "torch-sdpa"

    def __init__(self, *, is_bounded: bool = False, replays: bool = False) -> None:
        self._replays = replays
        self._is_bounded = is_bounded
        self._gatherer = Gatherer(TorchKVStore())

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        if batch.real_T is not None:
            return PaddedDecode(batch, TorchKVStore())
        return TorchStep(batch, self._gatherer, self._is_bounded)

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return padded_width(shape, kv, dtype) if self._replays else None


class DecodeGroup(NamedTuple):
    """Rows with one query each. tokens_R: their indices in the step, None when they are all tokens in order.

    block_ids: the blocks of all rows, one row after another, J / block_size each. mask_R11J: as_mask of visible
    positions, neither padding nor outside the window; None when all are visible.
    """

    num_rows: int
    tokens_R: torch.Tensor | None
    block_ids: torch.Tensor
    mask_R11J: torch.Tensor | None


class DecodeGroups:
    """The rows of one step, decodes in groups of similar length, made once for each group of layers and window.
    is_bounded: decodes of more than may be gathered at once are chunks."""

    def __init__(self, batch: ForwardBatch, *, is_bounded: bool) -> None:
        self._batch = batch
        self._is_bounded = is_bounded
        self._layouts: RowLayouts | None = None
        self._groups: dict[tuple[int | None, int], list[DecodeGroup]] = {}

    def of(self, window: int | None, kv: LayerKV, dtype: torch.dtype, mask_dtype: torch.dtype) -> list[DecodeGroup]:
        """Return the groups for a layer's cache and queries of `dtype`."""
        key = window, kv.group
        if key not in self._groups:
            self._groups[key] = self._grouped(window, kv, dtype, mask_dtype)
        return self._groups[key]

    def chunks(self, window: int | None, kv: LayerKV, dtype: torch.dtype) -> list[Chunk]:
        """Return the rows that are in no group."""
        return self._layout(window, kv, dtype).chunks

    def _layout(self, window: int | None, kv: LayerKV, dtype: torch.dtype) -> RowLayout:
        if self._layouts is None:
            longest = piece_blocks(kv, dtype) if self._is_bounded else None
            self._layouts = RowLayouts(self._batch, most_queries=1, most_blocks=longest)
        return self._layouts.of(window, kv, dtype)

    def _grouped(
        self, window: int | None, kv: LayerKV, dtype: torch.dtype, mask_dtype: torch.dtype
    ) -> list[DecodeGroup]:
        batch, layout = self._batch.of_group(kv.group), self._layout(window, kv, dtype)
        spans = {row: visible_span(batch, row, window) for row in layout.decodes}
        max_blocks = max(1, GROUP_BYTES // (2 * kv.keys[0].numel() * dtype.itemsize))
        cost = GROUP_COST_TOKENS // batch.block_size
        row_groups = _similar_rows({row: len(span) for row, span in spans.items()}, cost, max_blocks)
        in_order = len(row_groups) == 1 and not layout.chunks
        return [_group(batch, rows, [spans[row] for row in rows], in_order, window, mask_dtype) for rows in row_groups]


class TorchStep:
    """One step."""

    def __init__(self, batch: ForwardBatch, gatherer: Gatherer, is_bounded: bool) -> None:
        self._is_bounded = is_bounded
        self._gatherer = gatherer
        self._sdpa = SdpaChunks()
        self._general = GeneralAttention(batch, gatherer)
        self._groups = DecodeGroups(batch, is_bounded=is_bounded)

    def attend(
        self, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV, params: AttentionParams
    ) -> torch.Tensor:
        if not params.is_plain:
            return self._general.attend(q_TND, k_TKD, v_TKD, kv, params)
        groups = self._groups.of(params.window, kv, q_TND.dtype, q_TND.dtype)
        if len(groups) == 1 and groups[0].tokens_R is None:
            return self._attend_group(groups[0], q_TND, kv, params.scale)
        out_TND = torch.empty(q_TND.shape, dtype=q_TND.dtype, device=q_TND.device)
        for group in groups:
            assert group.tokens_R is not None
            out_TND[group.tokens_R] = self._attend_group(group, q_TND[group.tokens_R], kv, params.scale)
        for chunk in self._groups.chunks(params.window, kv, q_TND.dtype):
            own = slice(chunk.start, chunk.stop)
            out_TND[own] = self._attend_chunk(chunk, q_TND[own], k_TKD, v_TKD, kv, params)
        return out_TND

    def _attend_chunk(
        self,
        chunk: Chunk,
        q_TND: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: LayerKV,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Return out_TND of the chunk's own queries, which it gets; keys and values are the step's."""
        in_pieces = self._is_bounded and not self._fits(chunk, q_TND, kv, params.window)
        if in_pieces or chunk.before is not None:
            pieces = context_pieces(self._gatherer, chunk, k_TKD, v_TKD, kv)
            return attend_in_pieces(q_TND, pieces, chunk.context_len, params, chunk.before)
        k_JKD, v_JKD = self._gatherer.context(chunk, k_TKD, v_TKD, kv)
        return self._sdpa.attend(q_TND, k_JKD, v_JKD, params)

    def _fits(self, chunk: Chunk, q_TND: torch.Tensor, kv: LayerKV, window: int | None) -> bool:
        """Return whether SDPA needs no mask, or both its scores, should it keep them, and the gather stay within
        bounds."""
        tokens = chunk.stop - chunk.start
        if chunk.block_ids is None and (window is None or window >= chunk.context_len):
            return True
        blocks = 0 if chunk.block_ids is None else len(chunk.block_ids)
        return blocks <= piece_blocks(kv, q_TND.dtype) and q_TND.shape[1] <= heads_that_fit(tokens, chunk.context_len)

    def _attend_group(self, group: DecodeGroup, q_RND: torch.Tensor, kv: LayerKV, scale: float) -> torch.Tensor:
        """Return out_RND from one SDPA over all rows: the G query heads of a KV head act as its queries, with equal
        masks."""
        rows, (_, num_kv_heads, head_dim) = group.num_rows, kv.keys.shape[1:]
        k_RKJD, v_RKJD = (
            blocks.view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
            for blocks in self._gatherer.blocks(kv, group.block_ids, q_RND.dtype)
        )
        q_RKGD = q_RND.reshape(rows, num_kv_heads, -1, head_dim)
        out_RKGD = F.scaled_dot_product_attention(q_RKGD, k_RKJD, v_RKJD, attn_mask=group.mask_R11J, scale=scale)
        return out_RKGD.reshape(q_RND.shape)


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
    batch: ForwardBatch,
    rows: list[int],
    spans: list[range],
    in_order: bool,
    window: int | None,
    mask_dtype: torch.dtype,
) -> DecodeGroup:
    """Return a group's gather list and mask, made on the device: nothing is copied there. in_order: the group is the
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
    if all(batch.seq_lens_list[row] == width * block_size for row in rows) and window is None:
        return DecodeGroup(len(rows), tokens_R, block_ids, None)
    seen_RJ = seen_through(window, seq_len_R1 - 1 - position_RJ)
    return DecodeGroup(len(rows), tokens_R, block_ids, as_mask(seen_RJ, mask_dtype)[:, None, None])


def _places(rows: list[int], device: torch.device) -> torch.Tensor:
    """Return ascending numbers as an int64 tensor, put together of runs: a list would have to be copied."""
    runs, start = [], 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place] != rows[place - 1] + 1:
            runs.append(torch.arange(rows[start], rows[place - 1] + 1, device=device))
            start = place
    return runs[0] if len(runs) == 1 else torch.cat(runs)
