"""Triton's small operations against their torch twin: in its interpreter, and on a CUDA device where one is.

As in test_triton_lora.py, the tests run in a process of their own. New memory is full of NaN, so that what a kernel
leaves out is seen.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tandem.workers.kernels.fused_ops import FusedOps, TorchFusedOps
from tandem.workers.kernels.kv_store import LARGEST, SCALE_DTYPE, LayerKV, TorchKVStore, as_indexable, encode
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.arch import Activation
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import HostAccelerator
from tests.support.crowds import decoder_on
from tests.support.interpreted import DEVICE, INTERPRETED, computes, run_in_interpreter, starts
from tests.support.paged_rows import PagedRows, prompt_ids
from tests.support.pairwise import all_pairs
from tests.support.platforms import GpuOnHost, NoGraphs, replaced
from tests.support.recorded_graph import FRESH
from tests.support.tiny_models import BY_NAME, save_tiny_model

DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
TOKENS = [1, 3]
BLOCKS, BLOCK = 3, 4
MOST_KERNELS = {"llama-gqa": 10, "qwen3": 10, "deepseek_v3": 23}
"""Kernels of a dense layer's decode: two norms, four products, the way of q, k and v into the cache, attention and its
merge, and the activation. Of latents: two norms and three products more, two of which are part of attention, and copies
of what is normed, rotated and stored."""
OURS = {
    "add_norm": 2, "rotate_store": 1, "activate_rows": 1, "attend_parts": 1, "attend_latent_parts": 0, "merge_parts": 1,
}  # fmt: skip
OURS_OF_LATENTS = {**OURS, "add_norm": 4, "attend_parts": 0, "attend_latent_parts": 1}

pytest.importorskip("triton")


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch fills new memory with NaN, where kernels run."""
    if not INTERPRETED and not torch.cuda.is_available():
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device=DEVICE).isnan().all() and torch.ones(1, device=DEVICE).new_empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    if INTERPRETED:
        from tandem.workers.kernels.triton.triton_attention import Multiprocessors

        monkeypatch.setattr("tandem.workers.kernels.triton.triton_attention.H100", Multiprocessors(1, 0))


def triton_ops() -> FusedOps:
    from tandem.workers.kernels.triton.triton_fused_ops import TritonFusedOps

    return TritonFusedOps()


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(ours: torch.Tensor, twin: torch.Tensor, ulps: int = 1) -> None:
    """fp32: rounding noise; 16 bits: so many units in the last place of either."""
    unit = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[ours.dtype]
    torch.testing.assert_close(ours, twin, rtol=ulps * unit, atol=ulps * unit)


# ---- norms ----


@computes
@pytest.mark.parametrize(
    ("dtype", "tokens", "size", "adds"), all_pairs(DTYPES, TOKENS, (16, 50, 576, 1024), (True, False)), ids=str
)
def test_add_rms_norm(dtype: torch.dtype, tokens: int, size: int, adds: bool) -> None:
    weight = noise(size, dtype=dtype, seed=2)
    x = noise(tokens, size, dtype=dtype, seed=1) if adds else None
    residuals = [noise(tokens, size, dtype=dtype) for _ in range(2)]
    ours, twin = (
        each.add_rms_norm(x, residual, weight, 1e-5)
        for each, residual in zip((triton_ops(), TorchFusedOps()), residuals, strict=True)
    )
    close(ours, twin)
    assert torch.equal(*residuals)


@computes
@pytest.mark.parametrize(
    ("dtype", "size", "weighs", "shifts", "adds"),
    all_pairs(
        DTYPES, (16, 50, 576), (True, False), (True, False), (True, False), is_possible=lambda row: row[2] or not row[3]
    ),
    ids=str,
)
def test_add_layer_norm(dtype: torch.dtype, size: int, weighs: bool, shifts: bool, adds: bool) -> None:
    weight = noise(size, dtype=dtype, seed=2) if weighs else None
    bias = noise(size, dtype=dtype, seed=3) if shifts else None
    x = noise(3, size, dtype=dtype, seed=1) if adds else None
    residuals = [noise(3, size, dtype=dtype) + 3 for _ in range(2)]
    ours, twin = (
        each.add_layer_norm(x, residual, weight, bias, 1e-5)
        for each, residual in zip((triton_ops(), TorchFusedOps()), residuals, strict=True)
    )
    close(ours, twin, ulps=2)
    assert torch.equal(*residuals)


@computes
def test_rows_and_heads_that_are_too_wide_are_the_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "tandem.workers.kernels.triton.triton_fused_ops"
    for name, value in (("WIDEST", 40), ("WIDEST_HEAD", 20), ("add_norm", None), ("rotate_store", None)):
        monkeypatch.setattr(f"{module}.{name}", value)
    x, residual, weight = noise(2, 50), noise(2, 50, seed=1), noise(50, seed=2)
    for name, more in (("add_rms_norm", ()), ("add_layer_norm", (weight,))):
        found = [getattr(each, name)(x, residual.clone(), weight, *more, 1e-5) for each in (triton_ops(), TWIN)]
        assert torch.equal(*found)
    for dim in (7, 24):
        caches = [cache_of(2, dim, torch.float32) for _ in range(2)]
        qkv, slots, own = noise(2, 7, dim), torch.tensor([5, 2], device=DEVICE), noise(5, dim)
        found = [
            each.rotate_store(qkv[:, :5], qkv[:, 5:], own, 1e-6, None, None, kv, slots)
            for each, kv in zip((triton_ops(), TWIN), caches, strict=True)
        ]
        assert torch.equal(*found) and same_caches(*caches)


# ---- q, k and v ----

TWIN = TorchFusedOps()


def cache_of(kv_heads: int, dim: int, storage: torch.dtype) -> LayerKV:
    """A cache full of noise, the same each time."""
    size, scales = (BLOCKS, BLOCK, kv_heads), {}
    if storage in LARGEST:
        scales = {f"{name}_scales": noise(*size, seed=7).to(SCALE_DTYPE) for name in ("key", "value")}
    planes = (encode(noise(*size, dim, seed=seed), storage)[0] for seed in (8, 9))
    return LayerKV(*planes, **scales)


def bits(kv: LayerKV) -> list[torch.Tensor]:
    """The cache in types that compare NaN."""
    return [*map(as_indexable, kv.planes), *(scales.view(torch.int32) for scales in kv.scales)]


def same_caches(mine: LayerKV, its: LayerKV) -> bool:
    return all(map(torch.equal, bits(mine), bits(its)))


def angles(tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    phase = noise(tokens, 1, dim // 2, seed=2)
    cos, sin = torch.cat((phase.cos(), phase.cos()), -1), torch.cat((-phase.sin(), phase.sin()), -1)
    return cos.to(dtype), sin.to(dtype)


@computes
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "norms", "rotates", "storage"),
    all_pairs(
        DTYPES,
        ((3, 2), (14, 2), (16, 8), (20, 10)),
        (8, 24, 64, 80, 128),
        (True, False),
        (True, False),
        (None, *LARGEST, torch.float16),
    ),
    ids=str,
)
def test_rotate_store(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    norms: bool,
    rotates: bool,
    storage: torch.dtype | None,
) -> None:
    """q, k and v side by side in one product. The cache has what the twin stores of the same k, bit for bit, and
    nothing else is written; q and k differ from the twin's by its rounding between norm and rotation."""
    (num_heads, kv_heads), tokens = heads, 3
    qkv = noise(tokens, num_heads + 2 * kv_heads, dim, dtype=dtype)
    qk, v = qkv.split((num_heads + kv_heads, kv_heads), dim=1)
    weight = noise(num_heads + kv_heads, dim, dtype=dtype, seed=1) if norms else None
    cos, sin = angles(tokens, dim, dtype) if rotates else (None, None)
    slots = torch.tensor([9, 0, 6], device=DEVICE)
    mine, its = (cache_of(kv_heads, dim, storage or dtype) for _ in range(2))
    before = qkv.clone()
    found = triton_ops().rotate_store(qk, v, weight, 1e-6, cos, sin, mine, slots)
    assert torch.equal(qkv, before)
    close(found, TWIN.norm_rotate(qk, weight, 1e-6, cos, sin), ulps=8)
    TorchKVStore().write(found[:, num_heads:], v, its, slots)
    assert same_caches(mine, its)


@computes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rotate_stores_nothing(dtype: torch.dtype) -> None:
    qk, (cos, sin) = noise(3, 9, 24, dtype=dtype), angles(3, 24, dtype)
    for weight in (None, noise(9, 24, dtype=dtype, seed=1)):
        for of in ((cos, sin), (None, None)):
            close(*(each.norm_rotate(qk, weight, 1e-6, *of) for each in (triton_ops(), TWIN)), ulps=8)


def exact_codes(largest: float, values: Sequence[float]) -> torch.Tensor:
    """Heads whose scale is 1, with these values between the largest."""
    rows = torch.tensor(values).view(-1, 14)
    return torch.cat((torch.full((len(rows), 1), largest), rows, torch.full((len(rows), 1), -largest)), dim=1)


@computes
@pytest.mark.parametrize("storage", LARGEST, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_are_rounded_half_to_even(storage: torch.dtype, dtype: torch.dtype) -> None:
    """Every number halfway between two codes, and its neighbours; for fp8 the small ones and zero too."""
    if storage is torch.int8:
        middles = torch.arange(-126, 126) + 0.5
    else:
        codes = torch.arange(0, 0x7E, dtype=torch.uint8).view(storage).float()
        above = torch.arange(1, 0x7F, dtype=torch.uint8).view(storage).float()
        middles = torch.cat(((codes + above) / 2, -(codes + above) / 2))
    values = torch.cat((middles, middles * (1 - 2**-9), middles * (1 + 2**-9), torch.zeros(13), -torch.zeros(13)))
    values = torch.cat((values, torch.zeros(-len(values) % 14))).clamp(-LARGEST[storage], LARGEST[storage])
    keys_KD = exact_codes(LARGEST[storage], values.tolist()).to(DEVICE, dtype)
    qk, slots = keys_KD[None], torch.tensor([5], device=DEVICE)
    mine, its = (cache_of(len(keys_KD), 16, storage) for _ in range(2))
    triton_ops().rotate_store(qk, -qk, None, 0.0, None, None, mine, slots)
    TorchKVStore().write(qk, -qk, its, slots)
    assert same_caches(mine, its) and (mine.scales[0].flatten(0, 1)[5] == 1).all()


@computes
@pytest.mark.parametrize("storage", LARGEST, ids=str)
def test_scales_of_any_vector(storage: torch.dtype) -> None:
    """Zeros, elements that are missing or infinite, the greatest, and the least: a scale of the least number that is
    has no more bits, and codes are cut."""
    rows = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-38, 1e-45, 2.5e-43, 8.4e-43, 5e4]
    k = torch.stack([torch.tensor([value, -value / 3, *[0.0] * 5, value / 7]) for value in rows]).to(DEVICE)[None]
    k[0, 2, 1:] = noise(7)
    k[0, 3, 1] = 1.0
    slots = torch.tensor([7], device=DEVICE)
    mine, its = (cache_of(len(rows), 8, storage) for _ in range(2))
    triton_ops().rotate_store(k, k.flip(1), None, 0.0, None, None, mine, slots)
    TorchKVStore().write(k, k.flip(1), its, slots)
    for ours, twin in zip(mine.scales, its.scales, strict=True):
        torch.testing.assert_close(ours, twin, rtol=0, atol=0, equal_nan=True)
    assert all(map(torch.equal, map(as_indexable, mine.planes), map(as_indexable, its.planes)))


@computes
def test_steps_without_tokens() -> None:
    ops, kv, none = triton_ops(), cache_of(2, 8, torch.int8), noise(0, 5, 8)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert ops.rotate_store(none, none[:, :2], noise(5, 8), 1e-6, None, None, kv, slots).shape == (0, 5, 8)
    assert ops.add_rms_norm(None, noise(0, 24), noise(24), 1e-6).shape == (0, 24)
    assert ops.silu_mul(noise(0, 24)).shape == (0, 12)


# ---- activations ----


@computes
@pytest.mark.parametrize(("dtype", "kind", "gated"), all_pairs(DTYPES, tuple(Activation), (True, False)), ids=str)
def test_activate(dtype: torch.dtype, kind: Activation, gated: bool) -> None:
    for tokens, width in ((1, 16), (3, 86), (2, 1300)):
        x = 4 * noise(tokens, 2 * width + 6, dtype=dtype)
        ours, twin = x.clone()[:, : 2 * width], x.clone()[:, : 2 * width]  # the twin overwrites its own
        close(triton_ops().activate(ours, kind, gated=gated), TWIN.activate(twin, kind, gated=gated), ulps=2)
    gate_up = 4 * noise(3, 86, dtype=dtype)
    close(triton_ops().silu_mul(gate_up), TWIN.silu_mul(gate_up.clone()), ulps=2)


@computes
@pytest.mark.parametrize("kind", list(Activation))
@pytest.mark.parametrize("gated", [True, False])
def test_extremes_of_activations(kind: Activation, gated: bool) -> None:
    few = [-200.0, -88.0, -1e30, -9.0, 200.0, 1e30, 0.0, float("nan")]
    x = torch.tensor([[*few, *[1.0] * len(few)]], device=DEVICE)
    ours, twin = (each.activate(x.clone(), kind, gated=gated) for each in (triton_ops(), TWIN))
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-6, equal_nan=True)


# ---- whole models, on the platform of a GPU ----


def gpu(*, has_triton: bool) -> Platform:
    return replaced(GpuOnHost(HostAccelerator()), has_triton=lambda: has_triton)


def decoder_of(
    name: str, folder: Path, platform: Platform, kv_dtype: torch.dtype | None = None, *, is_dense: bool = False
) -> Decoder:
    model, dense = BY_NAME[name], {"first_k_dense_replace": 2} if is_dense else {}
    model = replace(model, changes={**model.changes, "num_hidden_layers": 2, **dense})
    decoder = decoder_on(platform, save_tiny_model(model, folder), [], kv_dtype)
    decoder.graphs = NoGraphs()
    return decoder


interprets = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has whole models on a device")


@interprets
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("qwen3", None), ("phi3-longrope", torch.int8), ("falcon-alibi", None), ("olmo2", None), ("deepseek_v3", None)],
)
@torch.no_grad()
def test_models_compute_as_with_the_twin(tmp_path: Path, name: str, kv_dtype: torch.dtype | None) -> None:
    """A prompt, then a decode beside a chunk: norms of heads, of layers and of all heads; parts of heads rotated, and
    none; latents, whose rotation alone is the kernel's."""
    logits = []
    for has_triton in (True, False):
        platform = gpu(has_triton=has_triton)
        decoder = decoder_of(name, tmp_path / str(has_triton), platform, kv_dtype)
        assert type(platform.fused_ops(torch.float32)) is not TorchFusedOps or not has_triton
        rows = PagedRows(decoder, 2, 16, block_size=8, kv_dtype=kv_dtype, platform=platform)
        for work in ([(0, prompt_ids(5, 200))], [(0, [7]), (1, prompt_ids(3, 200, seed=1))]):
            logits.append(decoder.forward(rows.batch(work, all_logits=True), rows.kv, None))
    tolerance = 1e-4 if kv_dtype is None else 2e-2
    for ours, twin in zip(logits[:2], logits[2:], strict=True):
        torch.testing.assert_close(ours, twin, rtol=0, atol=tolerance)


class Kernels(TorchDispatchMode):  # type: ignore[misc]
    """Counts what would be a kernel on a device: operations that make no views and no empty memory, and launches."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def of(self, body: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a function whose kernels count."""
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.counts[executor.fn.__name__] += 1
            with _disable_current_modes():
                launch(executor, *args, **kwargs)

        def counted(given: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch, self:
                patch.setattr(GridExecutor, "__call__", launched)
                return body(given)

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)
        if not is_view and func not in FRESH:
            self.counts[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


@interprets
@pytest.mark.parametrize("name", MOST_KERNELS)
@torch.no_grad()
def test_a_layer_is_few_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A decode of a dense layer, with a norm of heads too, and of one with latents. The parts of contexts are listed
    once for all layers."""
    torch.use_deterministic_algorithms(False)  # filling memory would count
    platform = gpu(has_triton=True)
    decoder = decoder_of(name, tmp_path, platform, is_dense=name == "deepseek_v3")
    rows = PagedRows(decoder, 2, 16, block_size=8, platform=platform)
    decoder.forward(rows.batch([(0, [5, 6]), (1, [7])]), rows.kv, None)
    kernels, layers = Kernels(), decoder.num_local_layers
    monkeypatch.setattr(decoder, "_walk", kernels.of(decoder._walk))
    decoder.forward(rows.batch([(0, [8]), (1, [9])]), rows.kv, None)
    ours = OURS_OF_LATENTS if name == "deepseek_v3" else OURS
    assert {name: kernels.counts[name] for name in ours} == {name: count * layers for name, count in ours.items()}
    assert kernels.counts.pop("list_parts") == 1
    assert kernels.counts.total() <= MOST_KERNELS[name] * layers, kernels.counts
