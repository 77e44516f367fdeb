"""Quantized KV: bounds of the error, vectors at the edges, the compiled store against its torch twin bit by bit."""

import pytest
import torch

from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.kv_store import LARGEST, KVStore, LayerKV, TorchKVStore, as_indexable, decode, encode
from tests.support.pairwise import all_pairs

STORAGES = [torch.int8, torch.float8_e4m3fn]
BLOCKS, BLOCK_SIZE = 5, 4


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def round_trip(x: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    return decode(*encode(x, storage), torch.float32)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_error_is_half_a_unit(storage: torch.dtype, size: float) -> None:
    """int8: half of max / 127. fp8: half a unit of 3 mantissa bits, or of the least exponent. The largest is exact."""
    x = noise(50, 3, 64) * size
    most = x.abs().amax(dim=-1, keepdim=True)
    least = 0.5 * most / 127 if storage is torch.int8 else torch.maximum(x.abs() * 2**-4, most / 448 * 2**-10)
    got = round_trip(x, storage)
    assert ((got - x).abs() <= least * (1 + 1e-4)).all()
    torch.testing.assert_close(got.abs().amax(dim=-1, keepdim=True), most, rtol=1e-6, atol=0)


@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_vectors_at_the_edges(storage: torch.dtype) -> None:
    """Zero stays zero, the largest of bf16 comes back, the least floats no larger than twice themselves."""
    x = torch.zeros(4, 1, 16)
    x[1, 0, :2] = torch.tensor([torch.finfo(torch.bfloat16).max, -1.0])
    x[2, 0, :2] = torch.tensor([1e-45, -1e-45])
    x[3, 0, :2] = torch.tensor([2e-43, -2e-43])
    got = round_trip(x, storage)
    assert not got[0].any() and got.isfinite().all()
    torch.testing.assert_close(got[1, 0, 0], x[1, 0, 0], rtol=1e-6, atol=0)
    assert (got[2:].abs() <= 2 * x[2:].abs()).all()


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_what_is_not_finite_is_nan_for_its_token_and_head_alone(storage: torch.dtype, what: float) -> None:
    x = noise(3, 2, 16)
    x[1, 0, 7] = what
    got = round_trip(x, storage)
    assert got[1, 0].isnan().all()
    assert got[[0, 2]].isfinite().all() and got[1, 1].isfinite().all()


def test_other_dtypes_are_a_cast() -> None:
    stored, scales = encode(noise(3, 2, 16), torch.bfloat16)
    assert scales is None and stored.dtype is torch.bfloat16
    assert torch.equal(decode(stored, None, torch.float32), noise(3, 2, 16).bfloat16().float())


def extremes(tokens: int, heads: int, dim: int) -> torch.Tensor:
    """Noise of every size, with zeros, ties of both formats, NaN, infinities, and vectors that are all zero."""
    x = noise(tokens, heads, dim) * 10.0 ** torch.randint(-38, 38, (tokens, 1, 1), generator=torch.manual_seed(1))
    x *= 2.0 ** torch.randint(-20, 1, x.shape, generator=torch.manual_seed(2))
    x[0], x[1, 0, 3], x[2, 0, 5], x[3, 0, 0] = 0, float("nan"), float("inf"), -float("inf")
    for token, largest in enumerate(LARGEST.values(), start=4):
        steps = torch.arange(dim) + 0.5
        x[token, 0] = steps if largest == 127 else 2.0 ** (torch.arange(dim) % 20 - 12) * (8 + steps % 8) / 8
        x[token, 0, 0] = largest
    return x


def filled(store: KVStore, x: torch.Tensor, storage: torch.dtype) -> tuple[LayerKV, torch.Tensor]:
    """A cache with x as its keys and -x as its values, and the keys' blocks 3, 0, 3 gathered."""
    tokens, heads, dim = x.shape
    shape = (BLOCKS, BLOCK_SIZE, heads)
    caches = [torch.zeros(*shape, dim, dtype=storage) for _ in "kv"]
    scales = [torch.zeros(shape) if storage in LARGEST else None for _ in "kv"]
    kv = LayerKV(caches[0], caches[1], scales[0], scales[1])
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.manual_seed(3))[:tokens]
    both = torch.cat((x, -x), dim=1)  # strided, as the decoder's are
    store.write(both[:, :heads], both[:, heads:], kv, slots)
    blocks = torch.tensor([3, 0, 3])
    return kv, store.gather(kv.keys, kv.key_scales, blocks, torch.empty(3, BLOCK_SIZE, heads, dim, dtype=x.dtype))


def test_a_cache_wider_than_what_is_computed_is_torchs() -> None:
    assert CpuKVStore.make(torch.bfloat16, torch.float32) is None


@pytest.mark.parametrize(
    ("dtype", "storage", "shape"),
    all_pairs(
        (torch.float32, torch.bfloat16),
        (*STORAGES, torch.bfloat16, torch.float32),
        ((1, 16), (2, 24), (3, 70), (8, 128)),
        is_possible=lambda row: row[:2] != (torch.bfloat16, torch.float32),
    ),
    ids=str,
)
def test_the_compiled_store_equals_its_twin(dtype: torch.dtype, storage: torch.dtype, shape: tuple[int, int]) -> None:
    store = CpuKVStore.make(dtype, storage)
    if store is None:
        pytest.skip("no C compiler")
    x = extremes(BLOCKS * BLOCK_SIZE - 1, *shape).to(dtype)
    (ours, ours_out), (twin, twin_out) = (filled(each, x, storage) for each in (store, TorchKVStore()))
    equal = {"rtol": 0, "atol": 0, "equal_nan": True}
    for side in ("keys", "values", "key_scales", "value_scales"):
        mine, its = getattr(ours, side), getattr(twin, side)
        assert mine is its is None or torch.testing.assert_close(as_indexable(mine), as_indexable(its), **equal) is None
    torch.testing.assert_close(ours_out, twin_out, **equal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    """All codes that are ever written: not -128 of int8, not NaN of fp8."""
    for storage in STORAGES:
        store = CpuKVStore.make(dtype, storage)
        if store is None:
            pytest.skip("no C compiler")
        codes = torch.arange(-128, 128).to(torch.int8).view(storage).view(1, 1, 1, 256)
        out = store.gather(codes, torch.ones(1, 1, 1), torch.tensor([0]), torch.empty(1, 1, 1, 256, dtype=dtype))
        wanted = codes.float()
        seen = wanted.isfinite()
        assert seen.sum() >= 254 and torch.equal(out[seen], wanted.to(dtype)[seen])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_the_twin_runs_on_cuda(storage: torch.dtype) -> None:
    """But for the last bit of scales: a GPU multiplies by the reciprocal where a CPU divides."""
    x = noise(3, 2, 16).cuda()
    torch.testing.assert_close(round_trip(x, storage).cpu(), round_trip(x.cpu(), storage), rtol=2**-22, atol=0)
