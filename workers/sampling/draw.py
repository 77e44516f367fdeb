"""From weights to a token: truncation thresholds (min-p, top-k, top-p) and the inverse CDF. Called by sampler.py.

Weights are exp((logit - best logit) / temperature), float32, so the best token's weight is 1 and nothing has to be
normalized. Every truncation keeps {id: weight >= threshold}: ties at the border stay together, so the outcome depends
on no sort order. Legend: R rows, V vocabulary, K sorted weights, C chunk, N chunks.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.platforms.base import Platform

CHUNK = 128


def draw(weights_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over ids in ascending order: the first id whose cumulative weight exceeds u * total. int64 [R].

    Rows with NaN give some id; the caller reports those. uniforms_R: float64 in [0, 1).
    """
    ends_RN = _chunk_sums(weights_RV).cumsum(1)
    total_R1 = ends_RN[:, -1:]
    target_R1 = torch.minimum(uniforms_R[:, None] * total_R1, total_R1 * (1 - 2.0**-52))
    return _crossing(weights_RV, ends_RN, target_R1, torch.le)


def _crossing(
    weights_RV: torch.Tensor,
    ends_RN: torch.Tensor,
    target_R1: torch.Tensor,
    short_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The first index whose cumulative weight is no longer `short_of` (torch.le or torch.lt) the target: int64 [R].

    Two levels (sums of 128 entries in ends_RN, then the entries of one such chunk, both in float64): one pass over the
    row and no cumulative sum of it.
    """
    vocab = weights_RV.shape[1]
    chunk_R1 = short_of(ends_RN, target_R1).sum(1, keepdim=True).clamp_(max=ends_RN.shape[1] - 1)
    before_R1 = torch.where(chunk_R1 > 0, ends_RN.gather(1, (chunk_R1 - 1).clamp(min=0)), 0.0)
    offsets_C = torch.arange(CHUNK, device=weights_RV.device)
    ids_RC = chunk_R1 * CHUNK + offsets_C
    part_RC = weights_RV.gather(1, ids_RC.clamp(max=vocab - 1)).double().masked_fill_(ids_RC >= vocab, 0.0)
    place_R = short_of(part_RC.cumsum(1) + before_R1, target_R1).sum(1)
    last_R = torch.where(part_RC > 0, offsets_C, 0).amax(1)  # rounding between the levels must not leave the chunk
    return chunk_R1[:, 0] * CHUNK + torch.minimum(place_R, last_R)


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
    platform: Platform,
) -> torch.Tensor:
    """The least weight that each row keeps, float32 [R]. Order as in vLLM's V1 sampler: min-p, top-k, top-p.

    min_p: at least min_p times the best weight. top_k: the k best, ties included. top_p: the fewest best ones whose
    share of what is left reaches top_p, at least one. top_k 0, top_p 1, min_p 0 are off.
    """
    to_device = platform.accelerator.to_device
    floor_R = to_device(torch.from_numpy(min_p_R.astype(np.float32)))
    limited, nucleus = np.flatnonzero(top_k_R), np.flatnonzero(top_p_R < 1)
    if not (len(limited) or len(nucleus)):
        return floor_R
    sorted_RK = platform.descending(weights_RV, weights_RV.shape[1] if len(nucleus) else int(top_k_R.max()))
    if len(limited):
        rows = to_device(torch.from_numpy(limited))
        place_R = to_device(torch.from_numpy(np.minimum(top_k_R[limited], weights_RV.shape[1]) - 1))
        floor_R[rows] = torch.maximum(floor_R[rows], sorted_RK[rows, place_R])
    if len(nucleus):
        rows = to_device(torch.from_numpy(nucleus))
        top_p = to_device(torch.from_numpy(top_p_R[nucleus]))
        some_have_a_floor = bool(min_p_R.any() or top_k_R.any())
        floor_R[rows] = _nucleus_floor(sorted_RK[rows], floor_R[rows], top_p, some_have_a_floor)
    return floor_R


def _nucleus_floor(
    sorted_RV: torch.Tensor, floor_R: torch.Tensor, top_p_R: torch.Tensor, some_have_a_floor: bool
) -> torch.Tensor:
    """The weight of the last token in each row's nucleus, counting only weights of at least floor_R; never below it."""
    kept_RV = sorted_RV.masked_fill(sorted_RV < floor_R[:, None], 0.0) if some_have_a_floor else sorted_RV
    ends_RN = _chunk_sums(kept_RV).cumsum(1)
    last_R = _crossing(kept_RV, ends_RN, top_p_R[:, None] * ends_RN[:, -1:], torch.lt)
    return torch.maximum(floor_R, kept_RV.gather(1, last_R[:, None])[:, 0])
