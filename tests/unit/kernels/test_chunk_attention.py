"""Prefill chunks by the compiled softmax: weights that vanish, scores that are no numbers, widths of values, blocks of
a long context, and bf16 on CPUs that compute it in float32."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tandem.workers.kernels.cpu.attention import cpu_chunk_attention
from tandem.workers.kernels.cpu.attention.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.cpu_build import cpu_chunk_library
from tandem.workers.models.spec.arch import AttentionParams

BF16 = torch.bfloat16
DTYPES = pytest.mark.parametrize(
    ("dtype", "computed"),
    [(BF16, BF16), (BF16, torch.float32), (torch.float32, torch.float32)],
    ids=["bf16", "bf16 in float32", "float32"],
)
SLOPES = (8.0, 0.5)
"""The first head's weights vanish within a dozen positions."""


def attention(computed: torch.dtype) -> CpuChunkAttention:
    library = cpu_chunk_library(computed)
    if library is None:
        pytest.skip("needs a C compiler")
    return CpuChunkAttention(library, computed)


def draw(num_tokens: int, num_heads: int, seed: int, dtype: torch.dtype, dim: int = 16) -> torch.Tensor:
    return torch.randn(num_tokens, num_heads, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: tuple[float, ...] | None) -> torch.Tensor:
    """By the definition, in float64, of one KV head."""
    at_J = torch.arange(len(k))
    back_TJ = at_J[len(k) - len(q) :, None] - at_J
    scores = torch.einsum("tnd,jd->ntj", q.double(), k[:, 0].double()) * 0.25
    if slopes is not None:
        scores -= torch.tensor(slopes).double()[:, None, None] * back_TJ
    weights = scores.masked_fill(back_TJ < 0, -torch.inf).softmax(-1)
    return torch.einsum("ntj,jd->tnd", weights, v[:, 0].double())


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 0.03 if out.dtype is BF16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@DTYPES
def test_weights_that_vanish_change_nothing(dtype: torch.dtype, computed: torch.dtype) -> None:
    q, k, v = draw(40, 2, 0, dtype), draw(300, 1, 1, dtype), draw(300, 1, 2, dtype)
    out = attention(computed).attend(q, k, v, AttentionParams(scale=0.25, slopes=SLOPES))
    check(out, wanted(q, k, v, SLOPES))


@DTYPES
@pytest.mark.parametrize("width", [8, 24])
def test_values_may_be_narrower_or_wider_than_keys(dtype: torch.dtype, computed: torch.dtype, width: int) -> None:
    q, k, v = draw(40, 2, 0, dtype), draw(90, 1, 1, dtype), draw(90, 1, 2, dtype, width)
    out = attention(computed).attend(q, k, v, AttentionParams(scale=0.25))
    assert out.shape == (40, 2, width) and out.dtype is dtype
    check(out, wanted(q, k, v, None))


@DTYPES
def test_a_long_context_is_attended_to_by_fewer_queries_at_once(
    dtype: torch.dtype, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(50, 2, 0, dtype), draw(300, 1, 1, dtype), draw(300, 1, 2, dtype)
    multiply, most = torch.bmm, [0]

    def noted(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        most[0] = max(most[0], one.shape[1])
        return multiply(one, other)

    monkeypatch.setattr(cpu_chunk_attention, "BLOCK_BYTES", 20 * 2 * 300 * computed.itemsize)
    monkeypatch.setattr(torch, "bmm", noted)
    out = attention(computed).attend(q, k, v, AttentionParams(scale=0.25))
    assert most == [20 * 2], "20 queries of two heads"
    check(out, wanted(q, k, v, None))
    attention(computed).attend(q, k, v, AttentionParams(scale=0.25, window=4))
    assert most == [45 * 2], "as many as see no more positions at once, through a window"


@pytest.mark.parametrize("is_faster", [0, 1])
def test_bf16_is_computed_in_what_the_library_says_is_faster(is_faster: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attention(BF16)
    asked: list[str] = []
    flag = SimpleNamespace(in_dll=lambda _, name: asked.append(name) or ctypes.c_int(is_faster))
    monkeypatch.setattr(cpu_chunk_attention, "ctypes", SimpleNamespace(c_int=flag))
    made = CpuChunkAttention.make(BF16)
    assert made is not None and made.dtype is (torch.float32 if is_faster else BF16)
    assert hasattr(cpu_chunk_library(BF16), asked[0]), "the library has that flag"


@DTYPES
@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "ALiBi"])
def test_scores_that_are_no_numbers_stay_seen(
    dtype: torch.dtype, computed: torch.dtype, slopes: tuple[float, ...] | None
) -> None:
    """Whoever attends to the key has no numbers either, by which the row is found to be broken; others have theirs."""
    q, k, v = draw(40, 2, 0, dtype), draw(40, 1, 1, dtype), draw(40, 1, 2, dtype)
    k[20, 0, 3] = torch.nan
    out = attention(computed).attend(q, k, v, AttentionParams(scale=0.25, slopes=slopes))
    assert out[:20].isfinite().all()
    assert out[20:].isnan().all()
