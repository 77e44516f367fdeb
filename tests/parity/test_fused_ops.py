"""The compiled small operations against their torch twins, whole vectors and odd widths, fp32 and bf16."""

import pytest
import torch

from tandem.workers.kernels.cpu.cpu_fused_ops import CpuFusedOps
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.kv_store import LayerKV, decode
from tandem.workers.models.spec.arch import Activation
from tandem.workers.platforms.cpu import CpuPlatform
from tests.support.pairwise import all_pairs

DTYPES = [torch.float32, torch.bfloat16]
TOKENS = [1, 3, 130]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def ops(dtype: torch.dtype) -> CpuFusedOps:
    selected = CpuPlatform().fused_ops(dtype)
    if not isinstance(selected, CpuFusedOps):
        pytest.skip("no C compiler")
    return selected


def close(ours: torch.Tensor, twin: torch.Tensor) -> None:
    """fp32: rounding noise; bf16: one unit in the last place of either."""
    tolerance = 2e-6 if ours.dtype is torch.float32 else 2**-7
    torch.testing.assert_close(ours, twin, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tokens", "size", "adds"), all_pairs(DTYPES, TOKENS, (16, 50, 576, 1024), (True, False)), ids=str
)
def test_add_rms_norm(ops: CpuFusedOps, dtype: torch.dtype, tokens: int, size: int, adds: bool) -> None:
    weight = noise(size, dtype=dtype, seed=2)
    x = noise(tokens, size, dtype=dtype, seed=1) if adds else None
    residuals = [noise(tokens, size, dtype=dtype) for _ in range(2)]
    results = [
        each.add_rms_norm(x, residual, weight, 1e-5)
        for each, residual in zip((ops, TorchFusedOps()), residuals, strict=True)
    ]
    close(*results)
    assert torch.equal(*residuals)


@pytest.mark.parametrize(
    ("dtype", "tokens", "size", "weighs", "shifts"),
    all_pairs(
        DTYPES, TOKENS, (16, 50, 576), (True, False), (True, False), is_possible=lambda row: row[3] or not row[4]
    ),
    ids=str,
)
def test_add_layer_norm(
    ops: CpuFusedOps, dtype: torch.dtype, tokens: int, size: int, weighs: bool, shifts: bool
) -> None:
    weight, bias = noise(size, dtype=dtype, seed=2), noise(size, dtype=dtype, seed=3)
    for x in (noise(tokens, size, dtype=dtype, seed=1), None):
        residuals = [noise(tokens, size, dtype=dtype) + 3 for _ in range(2)]
        results = [
            each.add_layer_norm(x, residual, weight if weighs else None, bias if shifts else None, 1e-5)
            for each, residual in zip((ops, TorchFusedOps()), residuals, strict=True)
        ]
        close(*results)
        assert torch.equal(*residuals)


@pytest.mark.parametrize(
    ("dtype", "dim", "together", "centered"), all_pairs(DTYPES, (8, 24, 64, 80), (None, 3), (True, False)), ids=str
)
def test_norm_heads(ops: CpuFusedOps, dtype: torch.dtype, dim: int, together: int | None, centered: bool) -> None:
    qkv, weight = noise(5, 7, dim, dtype=dtype), noise(5, dim, dtype=dtype, seed=1)
    ours, twin = (
        each.norm_heads(qkv[:, :5], weight, 1e-6, together=together, centered=centered)
        for each in (ops, TorchFusedOps())
    )
    close(ours, twin)


@pytest.mark.parametrize(
    ("dtype", "tokens", "dim", "norms", "rotates"),
    all_pairs(DTYPES, TOKENS, (8, 24, 32, 64, 80, 128), (True, False), (True, False)),
    ids=str,
)
def test_norm_rotate(ops: CpuFusedOps, dtype: torch.dtype, tokens: int, dim: int, norms: bool, rotates: bool) -> None:
    qkv = noise(tokens, 7, dim, dtype=dtype)
    weight = noise(5, dim, dtype=dtype, seed=1) if norms else None
    phase = noise(tokens, 1, dim // 2, dtype=torch.float32, seed=2)
    cos = torch.cat((phase.cos(), phase.cos()), -1).to(dtype) if rotates else None
    sin = torch.cat((-phase.sin(), phase.sin()), -1).to(dtype) if rotates else None
    close(*(each.norm_rotate(qkv[:, :5], weight, 1e-6, cos, sin) for each in (ops, TorchFusedOps())))


@pytest.mark.parametrize("storage", [None, torch.int8], ids=str)
def test_rotate_store(ops: CpuFusedOps, dtype: torch.dtype, storage: torch.dtype | None) -> None:
    """The rotated keys are in the cache, beside the values as they were."""
    qkv, slots, phase = noise(3, 9, 32, dtype=dtype), torch.tensor([5, 0, 6]), noise(3, 1, 32, dtype=dtype, seed=2)
    qk, v = qkv.split((7, 2), dim=1)
    found, caches = [], []
    for each in (ops, TorchFusedOps()):
        planes = [torch.zeros(2, 4, 2, 32, dtype=storage or dtype) for _ in "kv"]
        kv = LayerKV(*planes, *(torch.zeros(2, 4, 2) for _ in planes if storage is not None))
        found.append(each.rotate_store(qk, v, None, 0.0, phase.cos(), phase.sin(), kv, slots))
        caches.append(
            [decode(plane, scale, dtype) for plane, scale in zip(planes, kv.scales or (None,) * 2, strict=True)]
        )
    close(*found)
    for ours, twin in zip(*caches, strict=True):
        torch.testing.assert_close(ours, twin, rtol=0, atol=2**-5)
    near = 2**-5 if storage is not None else 0.0
    torch.testing.assert_close(caches[0][0].flatten(0, 1)[slots], found[0][:, 5:], rtol=0, atol=near)
    torch.testing.assert_close(caches[0][1].flatten(0, 1)[slots], v, rtol=0, atol=near)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("width", [16, 86, 1536])
def test_silu_mul(ops: CpuFusedOps, dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up = 8 * noise(tokens, 2 * width, dtype=dtype)
    close(*(each.silu_mul(gate_up.clone()) for each in (ops, TorchFusedOps())))


@pytest.mark.parametrize("kind", list(Activation))
@pytest.mark.parametrize("gated", [True, False])
def test_activate(ops: CpuFusedOps, dtype: torch.dtype, kind: Activation, gated: bool) -> None:
    for tokens, width in ((1, 16), (3, 86), (130, 300)):
        x = 2 * noise(tokens, 2 * width, dtype=dtype)
        close(*(each.activate(x.clone(), kind, gated=gated) for each in (ops, TorchFusedOps())))


@pytest.mark.parametrize("kind", list(Activation))
def test_extremes_of_activations(ops: CpuFusedOps, dtype: torch.dtype, kind: Activation) -> None:
    x = torch.tensor([[-200.0, -88.0, -1e30, -9.0, 200.0, 1e30, 0.0, float("nan")]]).to(dtype)
    ours, twin = (each.activate(x.clone(), kind, gated=False) for each in (ops, TorchFusedOps()))
    torch.testing.assert_close(ours, twin, rtol=1e-2, atol=1e-6, equal_nan=True)


def test_extremes(ops: CpuFusedOps, dtype: torch.dtype) -> None:
    """Infinite and missing values come out as torch's do."""
    gate_up = torch.tensor([[-200.0, -88.0, -1e30, 200.0, 1e30, 0.0, float("nan"), float("inf")] * 2 + [1.0] * 16])
    ours, twin = (each.silu_mul(gate_up.to(dtype)) for each in (ops, TorchFusedOps()))
    torch.testing.assert_close(ours, twin, rtol=1e-2, atol=1e-30, equal_nan=True)
