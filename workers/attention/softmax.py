"""Attention as its definition, in torch operations: what a query sees, scores of any AttentionParams, their softmax.

    scores[t, j] = cap(scale * q[t] . k[j]) - slope * (t - j), -inf where t does not see j
    out[t] = softmax_j(scores[t], sink) @ (v, 0 for the sink)

The one place where torch computes it. Backends of GPUs, and of CPUs without kernels, build on it, and it is the
reference of the kernels' tests; its own judge is transformers (tests/parity). In float32, float64 for float64. K KV
heads, G query heads of each, T queries, J positions, D elements of a key, V of a value, X any axes before them.
"""

from collections.abc import Sequence
from functools import cache

import torch

from tandem.workers.models.spec.arch import AttentionParams


def seen_through(window: int | None, back: torch.Tensor) -> torch.Tensor:
    """Return which keys a query attends to, as bools. back: by how many positions each key is behind each query."""
    seen = back >= 0
    if window is not None:
        seen &= back < window
    return seen


def as_mask(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask that SDPA adds to scores of `dtype`: 0 for visible positions, -inf for others; `seen` itself for
    bools."""
    if dtype is torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


@cache
def of_heads(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return slopes or sinks [N] on the device, made once and kept: a graph may read them."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def masked_scores(
    q_XKGTD: torch.Tensor,
    k_XKJD: torch.Tensor,
    params: AttentionParams,
    seen: torch.Tensor | None,
    back: torch.Tensor | None,
) -> torch.Tensor:
    """Return scores [..., K, G, T, J]. seen: None where every query sees all; back: as in seen_through, read for slopes
    alone."""
    wide = torch.float64 if q_XKGTD.dtype is torch.float64 else torch.float32
    products = q_XKGTD.flatten(-3, -2).to(wide) @ k_XKJD.to(wide).transpose(-1, -2)
    scores = products.unflatten(-2, q_XKGTD.shape[-3:-1]).mul_(params.scale)
    if params.softcap is not None:
        scores.div_(params.softcap).tanh_().mul_(params.softcap)
    if params.slopes is not None:
        assert back is not None
        scores -= _of_each(params.slopes, scores) * back
    return scores if seen is None else scores.masked_fill_(~seen, float("-inf"))


def attend(
    q_XKGTD: torch.Tensor,
    k_XKJD: torch.Tensor,
    v_XKJV: torch.Tensor,
    params: AttentionParams,
    seen: torch.Tensor | None = None,
    back: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return out [..., K, G, T, V] in q's dtype. seen and back: as for masked_scores."""
    scores = masked_scores(q_XKGTD, k_XKJD, params, seen, back)
    num_keys = scores.shape[-1]
    if params.sinks is not None:
        scores = torch.cat((scores, _of_each(params.sinks, scores).expand_as(scores[..., :1])), dim=-1)
    weights = scores.softmax(-1)[..., :num_keys]
    sums = weights.flatten(-3, -2) @ v_XKJV.to(weights.dtype)
    return sums.unflatten(-2, q_XKGTD.shape[-3:-1]).to(q_XKGTD.dtype)


def no_keys_yet(like_KGT: torch.Tensor, params: AttentionParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the greatest score and the sum of weights of a running softmax before any key: those of the sinks, if
    there are any."""
    if params.sinks is None:
        return torch.full_like(like_KGT, float("-inf")), torch.zeros_like(like_KGT)
    return _of_each(params.sinks, like_KGT[..., None])[..., 0].expand_as(like_KGT).clone(), torch.ones_like(like_KGT)


def _of_each(numbers: Sequence[float], scores: torch.Tensor) -> torch.Tensor:
    """Return numbers of heads as [K, G, 1, 1]."""
    return of_heads(numbers, scores.dtype, scores.device).view(*scores.shape[-4:-2], 1, 1)
