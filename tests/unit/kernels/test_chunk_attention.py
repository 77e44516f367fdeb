"""The compiled softmax of prefill chunks: weights that vanish, and scores that are no numbers."""

import pytest
import torch

from tandem.workers.kernels.cpu.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.models.spec.arch import AttentionParams

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
SLOPES = (8.0, 0.5)
"""The first head's weights vanish within a dozen positions."""


def attention(dtype: torch.dtype) -> CpuChunkAttention:
    found = CpuChunkAttention.make(dtype)
    if found is None:
        pytest.skip("needs a C compiler")
    return found


def draw(num_tokens: int, num_heads: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
def test_weights_that_vanish_change_nothing(dtype: torch.dtype) -> None:
    q, k, v = draw(40, 2, 0, dtype), draw(300, 1, 1, dtype), draw(300, 1, 2, dtype)
    out = attention(dtype).attend(q, k, v, AttentionParams(scale=0.25, slopes=SLOPES))
    place_T, at_J = torch.arange(260, 300), torch.arange(300)
    back_TJ = place_T[:, None] - at_J
    scores = torch.einsum("tnd,jd->ntj", q.double(), k[:, 0].double()) * 0.25
    scores -= torch.tensor(SLOPES).double()[:, None, None] * back_TJ
    weights = scores.masked_fill(back_TJ < 0, -torch.inf).softmax(-1)
    wanted = torch.einsum("ntj,jd->tnd", weights, v[:, 0].double())
    tolerance = 0.03 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "ALiBi"])
def test_scores_that_are_no_numbers_stay_seen(dtype: torch.dtype, slopes: tuple[float, ...] | None) -> None:
    """Whoever attends to the key has no numbers either, by which the row is found to be broken; others have theirs."""
    q, k, v = draw(40, 2, 0, dtype), draw(40, 1, 1, dtype), draw(40, 1, 2, dtype)
    k[20, 0, 3] = torch.nan
    out = attention(dtype).attend(q, k, v, AttentionParams(scale=0.25, slopes=slopes))
    assert out[:20].isfinite().all()
    assert out[20:].isnan().all()
