"""From weights to a token: truncation thresholds (min-p, top-k, top-p) and the inverse CDF. Called by sampler.py.

Weights are exp((logit - best logit) / temperature), float32, so the best token's weight is 1 and nothing has to be
normalized. Every truncation keeps {id: weight >= threshold}: ties at the border stay together, so the outcome depends
on no sort order. Legend: R rows, V vocabulary, K sorted prefix, C chunk, N chunks.
"""

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 128
FIRST_PREFIX = 256
PREFIX_GROWTH = 16


def draw(weights_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over ids in ascending order: the first id whose cumulative weight exceeds u * total. int64 [R].

    Two levels (sums of 128 ids, then the ids of one such chunk, both in float64): one pass over the vocabulary and
    no cumulative sum of it. Rows with NaN give some id; the caller reports those. uniforms_R: float64 in [0, 1).
    """
    vocab = weights_RV.shape[1]
    ends_RN = _chunk_sums(weights_RV).cumsum(1)
    total_R1 = ends_RN[:, -1:]
    target_R1 = torch.minimum(uniforms_R[:, None] * total_R1, total_R1 * (1 - 2.0**-52))
    chunk_R1 = (ends_RN <= target_R1).sum(1, keepdim=True).clamp_(max=ends_RN.shape[1] - 1)
    before_R1 = torch.where(chunk_R1 > 0, ends_RN.gather(1, (chunk_R1 - 1).clamp(min=0)), 0.0)
    offsets_C = torch.arange(CHUNK, device=weights_RV.device)
    ids_RC = chunk_R1 * CHUNK + offsets_C
    part_RC = weights_RV.gather(1, ids_RC.clamp(max=vocab - 1)).double().masked_fill_(ids_RC >= vocab, 0.0)
    place_R = (part_RC.cumsum(1) + before_R1 <= target_R1).sum(1)
    last_R = torch.where(part_RC > 0, offsets_C, 0).amax(1)  # rounding between the levels must not leave the chunk
    return (chunk_R1[:, 0] * CHUNK + torch.minimum(place_R, last_R)).clamp_(max=vocab - 1)


def _chunk_sums(weights_RV: torch.Tensor) -> torch.Tensor:
    """Sums of CHUNK consecutive ids, the last one maybe shorter: float64 [R, N]."""
    vocab = weights_RV.shape[1]
    whole = vocab // CHUNK
    parts = [weights_RV[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).sum(-1)] if whole else []
    if vocab % CHUNK:
        parts.append(weights_RV[:, whole * CHUNK :].sum(-1, keepdim=True))
    return torch.cat(parts, 1).double()


def thresholds(
    weights_RV: torch.Tensor,
    top_k_R: npt.NDArray[np.int64],
    top_p_R: npt.NDArray[np.float64],
    min_p_R: npt.NDArray[np.float64],
) -> torch.Tensor:
    """The least weight that each row keeps, float32 [R]. Order as in vLLM's V1 sampler: min-p, top-k, top-p.

    min_p: at least min_p times the best weight. top_k: the k best, ties included. top_p: the fewest best ones whose
    share of what is left reaches top_p, at least one. top_k 0, top_p 1, min_p 0 are off.
    """
    device, vocab = weights_RV.device, weights_RV.shape[1]
    floor_R = torch.from_numpy(min_p_R).to(device=device, dtype=torch.float32)
    limited = top_k_R > 0
    nucleus = top_p_R < 1
    if not (limited.any() or nucleus.any()):
        return floor_R
    prefix = min(vocab, max(int(top_k_R.max()), FIRST_PREFIX if nucleus.any() else 1))
    best_RK = weights_RV.topk(prefix, dim=1).values
    if limited.any():
        place_R1 = torch.from_numpy(np.clip(top_k_R, 1, prefix) - 1).to(device)[:, None]
        kth_R = best_RK.gather(1, place_R1)[:, 0]
        floor_R = torch.maximum(floor_R, torch.where(torch.from_numpy(limited).to(device), kth_R, 0.0))
    if nucleus.any():
        rows = torch.from_numpy(np.flatnonzero(nucleus)).to(device)
        wanted_R = torch.from_numpy(top_p_R[nucleus]).to(device)
        floor_R[rows] = _nucleus_floor(weights_RV, rows, best_RK[rows], floor_R[rows], wanted_R)
    return floor_R


def _nucleus_floor(
    weights_RV: torch.Tensor, rows: torch.Tensor, best_RK: torch.Tensor, floor_R: torch.Tensor, top_p_R: torch.Tensor
) -> torch.Tensor:
    """Raises floor_R to the weight of the last token in the top_p nucleus; sorts more of a row only when needed."""
    all_RV = weights_RV[rows]
    kept_RV = torch.where(all_RV >= floor_R[:, None], all_RV, 0.0)
    target_R1 = top_p_R[:, None] * _chunk_sums(kept_RV).sum(1, keepdim=True)
    while True:
        sorted_RK = best_RK.double()
        inside_RK = sorted_RK.cumsum(1) - sorted_RK < target_R1
        inside_RK[:, 0] = True
        last_R = inside_RK.sum(1, keepdim=True) - 1
        edge_R = best_RK.gather(1, last_R)[:, 0]
        prefix, vocab = best_RK.shape[1], all_RV.shape[1]
        open_R = inside_RK[:, -1] & (best_RK[:, -1] > floor_R)  # the nucleus goes on beyond the prefix
        if prefix == vocab or not bool(open_R.any()):
            return torch.maximum(floor_R, edge_R)
        best_RK = all_RV.topk(min(vocab, prefix * PREFIX_GROWTH), dim=1).values
