"""The attention backends against the oracle on random steps: rows, head layouts, windows, block sizes, dtypes."""

import dataclasses
import random

import pytest
import torch

from workers.attention.backend import AttentionBackend
from workers.attention.cpu import CpuAttention
from workers.attention.reference import ReferenceAttention
from workers.attention.select import select_attention
from workers.attention.torch_sdpa import TorchAttention
from workers.kernels.cpu_chunk_attention import CpuChunkAttention
from workers.kernels.cpu_decode_attention import CpuDecodeAttention
from workers.kernels.cpu_kv_quant import CpuKVStore
from workers.kernels.kv_quant import LayerKV, encode, movable
from workers.models.forward_batch import ForwardBatch

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
QUANTIZED = [torch.int8, torch.float8_e4m3fn]


def random_batch(rng: random.Random, block_size: int, query_lens: list[int], seq_lens: list[int]) -> ForwardBatch:
    """Rows with shuffled blocks; block 0 belongs to nobody."""
    counts = [-(-length // block_size) for length in seq_lens]
    free = list(range(1, 1 + sum(counts)))
    rng.shuffle(free)
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    slots, positions, starts = [], [], [0]
    for row, (count, queries, length) in enumerate(zip(counts, query_lens, seq_lens, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks)
        places = range(length - queries, length)
        slots += [blocks[p // block_size] * block_size + p % block_size for p in places]
        positions += places
        starts.append(len(slots))
    return ForwardBatch(
        input_ids_T=torch.zeros(len(slots), dtype=torch.int64),
        positions_T=torch.tensor(positions),
        slot_mapping_T=torch.tensor(slots),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RN=table,
        logits_rows_S=torch.tensor(starts[1:]) - 1,
        query_lens_list=query_lens,
        seq_lens_list=seq_lens,
        block_size=block_size,
    )


def check(
    backend: AttentionBackend,
    batch: ForwardBatch,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Same output as the oracle, and the same cache afterwards. Quantized: what is rounded to half precision on the way
    may differ by one more rounding."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    num_heads, num_kv_heads = heads
    storage = kv_dtype or dtype
    tokens, blocks = batch.num_tokens, int(batch.block_table_RN.max()) + 2
    # Strided views, as the decoder passes them: q, k and v are parts of one merged product.
    qkv = noise(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    planes = [plane for _ in "kv" for plane in encode(noise(blocks, batch.block_size, num_kv_heads, head_dim), storage)]
    outputs, caches = [], []
    for each in (backend, ReferenceAttention()):
        keys, key_scales, values, value_scales = (None if plane is None else plane.clone() for plane in planes)
        kv = LayerKV(keys, values, key_scales, value_scales)
        outputs.append(each.prepare(batch).forward(q, k, v, kv, head_dim**-0.5, window))
        caches.append([movable(plane) for plane in (keys, values, key_scales, value_scales) if plane is not None])
    assert all(torch.equal(ours, exact) for ours, exact in zip(*caches, strict=True))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=TOLERANCE[dtype])


def backends(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> list[AttentionBackend]:
    """torch's, and the compiled one where there is a compiler for it."""
    kernel = CpuDecodeAttention.make(dtype, head_dim, kv_dtype or dtype)
    store = CpuKVStore.make(dtype, head_dim, kv_dtype or dtype)
    return [
        TorchAttention(),
        *([CpuAttention(kernel, store, CpuChunkAttention.make(dtype))] if kernel and store else []),
    ]


@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_random_steps(seed: int, kv_dtype: torch.dtype | None) -> None:
    rng = random.Random(seed)
    num_rows = rng.randint(1, 9)
    seq_lens = [rng.choice((1, 2, 15, 16, 17, 40, 130)) for _ in range(num_rows)]
    query_lens = [rng.choice((1, 1, 1, min(3, length), length)) for length in seq_lens]
    num_kv_heads = rng.choice((1, 2, 3))
    heads = (num_kv_heads * rng.choice((1, 2, 3, 4, 5, 12)), num_kv_heads)
    window = rng.choice((None, None, 1, 7, 16, 33, 500))
    batch = random_batch(rng, rng.choice((1, 4, 16)), query_lens, seq_lens)
    head_dim = rng.choice((8, 24, 48, 64, 128))
    for backend in backends(torch.float32, head_dim, kv_dtype):
        check(backend, batch, heads, head_dim, window, kv_dtype=kv_dtype)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 112, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
def test_bf16_of_every_width_and_group(head_dim: int, group: int) -> None:
    """Pairs of q and k, four scores at a time, even and odd values: at every tail."""
    rng = random.Random(head_dim + group)
    for block_size in (1, 8, 16, 32):
        batch = random_batch(rng, block_size, [1] * 6, [1, 3, 16, 33, 130, 257])
        for backend in backends(torch.bfloat16, head_dim):
            check(backend, batch, (2 * group, 2), head_dim, rng.choice((None, 7, 40)), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
@pytest.mark.parametrize("window", [None, 1, 40, 200])
def test_half_precision(dtype: torch.dtype, window: int | None, kv_dtype: torch.dtype | None) -> None:
    batch = random_batch(random.Random(0), 16, [1, 1, 20, 5, 1, 300, 150], [300, 33, 20, 64, 1, 300, 401])
    for backend in backends(dtype, 128, kv_dtype):
        check(backend, batch, (16, 8), 128, window, dtype, kv_dtype)


def test_many_groups_and_one_backend_for_many_steps() -> None:
    """Lengths far apart fall into several groups; scratch memory of one step does not leak into the next."""
    rng = random.Random(0)
    each = backends(torch.float32, 64)
    for lengths in ([2000, 1, 700, 16, 1500, 3], [5, 5], [900] * 5, list(range(1, 40))):
        batch = random_batch(rng, 16, [1] * len(lengths), lengths)
        for backend in each:
            check(backend, batch, (4, 2), 64)


def test_selection() -> None:
    """The compiled kernel for what it serves, SDPA for the rest; both have names for the log."""
    cpu = torch.device("cpu")
    assert select_attention(cpu, torch.float16, 64).name == "torch-sdpa"
    assert select_attention(cpu, torch.float32, 24).name == "torch-sdpa"
    assert select_attention(cpu, torch.bfloat16, 64).name == backends(torch.bfloat16, 64)[-1].name
    for kv_dtype in QUANTIZED:
        assert select_attention(cpu, torch.bfloat16, 64, kv_dtype).name == backends(torch.bfloat16, 64)[-1].name
        assert select_attention(cpu, torch.float16, 64, kv_dtype).name == "torch-sdpa"


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
def test_a_value_that_is_not_finite_shows(kv_dtype: torch.dtype | None, side: str, what: float) -> None:
    """What one row wrote makes that row not finite, now and in later steps, and no other row. Infinite unquantized keys
    are left out: a score of -inf is a legal one."""
    if kv_dtype is None and side == "keys" and what == float("inf"):
        pytest.skip("legal")
    for backend in backends(torch.float32, 64, kv_dtype):
        q, k, v = (torch.ones(4, heads, 64) for heads in (4, 2, 2))
        (k if side == "keys" else v)[0, :, 5] = what
        storage = kv_dtype or torch.float32
        sides = [encode(torch.zeros(9, 16, 2, 64), storage) for _ in "kv"]
        kv = LayerKV(sides[0][0], sides[1][0], sides[0][1], sides[1][1])
        batch = random_batch(random.Random(0), 16, [3, 1], [3, 40])
        outputs = [backend.prepare(batch).forward(q, k, v, kv, 0.125, None)]
        later = dataclasses.replace(
            random_batch(random.Random(0), 16, [1, 1], [4, 41]),
            block_table_RN=batch.block_table_RN,
            slot_mapping_T=torch.stack((batch.slot_mapping_T[2] + 1, batch.slot_mapping_T[3] + 1)),
        )
        outputs.append(backend.prepare(later).forward(q[2:], k[2:], v[2:], kv, 0.125, None))
        for out in outputs:  # the first row's last token, which is sampled from, and the other row
            assert not out[-2].isfinite().all(-1).any() and out[-1].isfinite().all()
