"""Attention of one row over a context of any length in bounded memory: keys and values pass by in pieces.

The running softmax of FlashAttention (Dao et al. 2022) in torch operations, for any AttentionParams: where no kernel
attends with a mask in bounded memory, and for scores that no kernel computes. Scores are products in float32: rounded
before the softmax they would be off by percents. At once there are a piece of GATHER_BYTES of keys and values, its keys
in float32, three arrays of SCORE_BYTES and float32 sums of the chunk's size: WORKSPACE_BYTES beside these sums,
whatever the context. T tokens of the chunk, J positions of a piece, N query heads, K KV heads, G = N / K, D head dim.
"""

from collections.abc import Iterator
from typing import Final

import torch

from tandem.workers.attention.chunks import Gatherer
from tandem.workers.attention.row_layout import Chunk
from tandem.workers.attention.softmax import masked_scores, no_keys_yet, seen_through
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.planning.budget import GATHER_BYTES

SCORE_BYTES: Final = 64 * 2**20
"""Scores in float32, with or without a kernel of torch's own that keeps them."""
WORKSPACE_BYTES: Final = 2 * GATHER_BYTES + 3 * SCORE_BYTES


def piece_blocks(kv: LayerKV, dtype: torch.dtype) -> int:
    """Return the number of blocks whose keys and values, in `dtype`, take at most GATHER_BYTES; at least one."""
    return max(1, GATHER_BYTES // (2 * kv.keys[0].numel() * dtype.itemsize))


def heads_that_fit(num_tokens: int, context_len: int) -> int:
    """Return of how many heads a chunk's scores take at most SCORE_BYTES together."""
    return SCORE_BYTES // (num_tokens * context_len * 4)


def context_pieces(
    gatherer: Gatherer, chunk: Chunk, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: LayerKV
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (k_JKD, v_JKD) of the chunk's context in order, each valid until the next."""
    blocks, block_size = piece_blocks(kv, k_TKD.dtype), kv.keys.shape[1]
    step = blocks * block_size
    for start in range(0, chunk.context_len, step):
        stop = min(start + step, chunk.context_len)
        if chunk.block_ids is None:
            own = slice(chunk.start + start, chunk.start + stop)
            yield k_TKD[own], v_TKD[own]
        else:
            ids = chunk.block_ids[start // block_size : -(-stop // block_size)]
            k_BSKD, v_BSKD = gatherer.blocks(kv, ids, k_TKD.dtype)
            yield k_BSKD.flatten(0, 1)[: stop - start], v_BSKD.flatten(0, 1)[: stop - start]


def attend_in_pieces(
    q_TND: torch.Tensor,
    pieces: Iterator[tuple[torch.Tensor, torch.Tensor]],
    context_len: int,
    params: AttentionParams,
    before: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return out_TND, as wide as the values; the chunk's tokens are the last T of the context's positions, or those
    behind the first `before` (Chunk)."""
    tokens, heads, dim = q_TND.shape
    sums_KGTD: torch.Tensor | None = None
    first = 0
    for k_JKD, v_JKD in pieces:
        length, kv_heads, _ = k_JKD.shape
        group = heads // kv_heads
        q_KGTD = q_TND.view(tokens, kv_heads, group, dim).permute(1, 2, 0, 3)
        if sums_KGTD is None:
            sums_KGTD = q_TND.new_zeros((kv_heads, group, tokens, v_JKD.shape[2]), dtype=torch.float32)
            most_KGT, total_KGT = no_keys_yet(sums_KGTD[..., 0], params)
        k_KJD, v_KJD = k_JKD.transpose(0, 1), v_JKD.transpose(0, 1)
        rows = max(1, SCORE_BYTES // (heads * length * 4))
        for start in range(0, tokens, rows):
            own = slice(start, min(start + rows, tokens))
            position_T1 = torch.arange(own.start, own.stop, dtype=torch.int32, device=q_TND.device)[:, None]
            position_T1 += context_len - tokens if before is None else before
            back_TJ = position_T1 - torch.arange(first, first + length, dtype=torch.int32, device=q_TND.device)
            _add_tile(
                q_KGTD[:, :, own], k_KJD, v_KJD, back_TJ, params,
                sums_KGTD[:, :, own], most_KGT[:, :, own], total_KGT[:, :, own],
            )  # fmt: skip
        first += length
    assert sums_KGTD is not None, "a context without tokens"
    return (sums_KGTD / total_KGT[..., None]).permute(2, 0, 1, 3).flatten(1, 2).to(q_TND.dtype)


def _add_tile(
    q_KGTD: torch.Tensor,
    k_KJD: torch.Tensor,
    v_KJD: torch.Tensor,
    back_TJ: torch.Tensor,
    params: AttentionParams,
    sums_KGTD: torch.Tensor,
    most_KGT: torch.Tensor,
    total_KGT: torch.Tensor,
) -> None:
    """Add a piece to the running sums, in place, rescaled to the greatest score so far."""
    kv_heads, group, tokens, _ = q_KGTD.shape
    scores_KGTJ = masked_scores(q_KGTD, k_KJD, params, seen_through(params.window, back_TJ), back_TJ)
    new_most_KGT = torch.maximum(most_KGT, scores_KGTJ.amax(-1))
    base_KGT = new_most_KGT.masked_fill(new_most_KGT == float("-inf"), 0.0)  # nothing seen yet
    weights_KGTJ = scores_KGTJ.sub_(base_KGT[..., None]).exp_()
    kept_KGT = (most_KGT - base_KGT).exp_()
    total_KGT.mul_(kept_KGT).add_(weights_KGTJ.sum(-1))
    parts_KMD = weights_KGTJ.view(kv_heads, group * tokens, -1).to(v_KJD.dtype) @ v_KJD
    sums_KGTD.mul_(kept_KGT[..., None]).add_(parts_KMD.view(sums_KGTD.shape))
    most_KGT.copy_(new_most_KGT)
