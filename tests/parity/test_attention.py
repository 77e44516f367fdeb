"""The attention backends against the reference on random steps: rows, head layouts, windows, block sizes, dtypes."""

import dataclasses
import itertools
import math
import random
from operator import mul
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.workers.attention import pieces
from tandem.workers.attention.backend import AttentionBackend, AttentionStep
from tandem.workers.attention.chunks import Gatherer
from tandem.workers.attention.cpu_paged import CpuAttention
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.padded_decode import PaddedDecode
from tandem.workers.attention.pieces import attend_in_pieces
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.kernels.cpu.attention.cpu_chunk_attention import CpuChunkAttention
from tandem.workers.kernels.cpu.attention.cpu_decode_attention import CpuDecodeAttention
from tandem.workers.kernels.cpu.cpu_kv_quant import CpuKVStore
from tandem.workers.kernels.fused_ops import TorchFusedOps
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore, encode
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.platforms.cpu import CpuPlatform
from tests.left_to import rest_in_parity
from tests.support.attention_check import QUANTIZED, check, random_batch
from tests.support.reference_attention import attend_row


def backends(dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> list[AttentionBackend]:
    """torch's, and the compiled one where there is a compiler for it."""
    kernel = CpuDecodeAttention.make(dtype, head_dim, kv_dtype or dtype)
    store, chunk_kernel = CpuKVStore.make(dtype, kv_dtype or dtype), CpuChunkAttention.make(dtype)
    compiled = CpuAttention(kernel, store, chunk_kernel) if kernel and store and chunk_kernel else None
    return [TorchAttention(), *([compiled] if compiled else [])]


def by_hand(
    q_TND: torch.Tensor, k_JKD: torch.Tensor, v_JKD: torch.Tensor, params: AttentionParams, token: int, head: int
) -> list[float]:
    """One query's output in Python's numbers, by the formula of attention/softmax.py."""
    group, position = q_TND.shape[1] // k_JKD.shape[1], len(k_JKD) - len(q_TND) + token
    first = 0 if params.window is None else max(0, position - params.window + 1)
    weights = []
    for key in range(first, position + 1):
        score = params.scale * sum(map(mul, q_TND[token, head].tolist(), k_JKD[key, head // group].tolist()))
        if params.softcap is not None:
            score = params.softcap * math.tanh(score / params.softcap)
        if params.slopes is not None:
            score -= params.slopes[head] * (position - key)
        weights.append(math.exp(score))
    total = sum(weights) + (0.0 if params.sinks is None else math.exp(params.sinks[head]))
    values = v_JKD[first : position + 1, head // group].T.tolist()
    return [sum(map(mul, weights, column)) / total for column in values]


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.3),
        AttentionParams(0.3, window=3),
        AttentionParams(0.5, softcap=2.0, sinks=(0.1, -1.0, 2.0, 0.5)),
        AttentionParams(0.3, window=5, softcap=3.0, slopes=(0.5, 0.1, 0.9, 0.01), sinks=(1.0, 0.0, -2.0, 0.3)),
    ],
    ids=["plain", "window", "cap and sinks", "all"],
)
def test_the_reference_is_the_formula(params: AttentionParams) -> None:
    """The tests' reference and the torch backends share their arithmetic (attention/softmax.py): this is its judge,
    beside transformers."""
    generator = torch.Generator().manual_seed(0)
    q_TND, k_JKD, v_JKV = (torch.randn(*shape, generator=generator) for shape in ((4, 4, 8), (9, 2, 8), (9, 2, 6)))
    wanted = torch.tensor([[by_hand(q_TND, k_JKD, v_JKV, params, t, n) for n in range(4)] for t in range(4)])
    whole = attend_row(q_TND, k_JKD, v_JKV, torch.arange(5, 9), params)
    in_pieces = attend_in_pieces(q_TND, iter([(k_JKD[:5], v_JKV[:5]), (k_JKD[5:], v_JKV[5:])]), 9, params)
    for found in (whole, in_pieces):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


SEEDS = {
    None: (0, 3, 7, 8, 11, 14),
    torch.int8: (1, 8, 14),
    torch.float8_e4m3fn: (4, 9, 11),
    torch.bfloat16: (0, 7, 13),
}
"""Of random steps, those in make test. Each kernel for heads of one size and a cache of one type is compiled by itself:
these are of all sizes, a cache of another type being read by fewer."""


@pytest.mark.parametrize(
    ("seed", "kv_dtype"),
    rest_in_parity(itertools.product(range(16), SEEDS), lambda seed, kv_dtype: seed in SEEDS[kv_dtype]),
    ids=str,
)
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


@pytest.mark.parametrize("kv_dtype", [None, QUANTIZED[0]], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_soft_caps_slopes_and_sinks(seed: int, kv_dtype: torch.dtype | None) -> None:
    """ALiBi, soft-capped scores, sinks and all of them, with and without a window, decodes and chunks."""
    rng = random.Random(seed)
    seq_lens = [rng.choice((1, 2, 17, 40, 130)) for _ in range(6)]
    query_lens = [rng.choice((1, min(3, length), length)) for length in seq_lens]
    batch, window = random_batch(rng, 16, query_lens, seq_lens), rng.choice((None, 7, 33))
    slopes = tuple(2.0 ** -rng.uniform(0, 8) for _ in range(6))
    sinks = tuple(rng.uniform(-3, 5) for _ in range(6))
    for softcap, own, sunk in ((5.0, None, None), (None, slopes, None), (None, None, sinks), (2.0, slopes, sinks)):
        for backend in backends(torch.float32, 32, kv_dtype):
            check(backend, batch, (6, 2), 32, window, kv_dtype=kv_dtype, softcap=softcap, slopes=own, sinks=sunk)


WHOLE, HALF, CODED = (torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)
SIZES = {
    WHOLE: {(8, (7, 1)), (80, (2, 2)), (112, (6, 2)), (256, (16, 2))},
    HALF: {(24, (6, 2)), (96, (7, 1)), (192, (16, 2)), (256, (2, 2))},
    CODED: {(8, (6, 2)), (24, (16, 2)), (112, (2, 2)), (256, (7, 1))},
}
"""Head sizes and heads in make test: every size and every group with some type."""


@pytest.mark.parametrize(
    ("head_dim", "groups", "types"),
    rest_in_parity(
        itertools.product([8, 24, 80, 96, 112, 192, 256], [(2, 2), (6, 2), (7, 1), (16, 2)], SIZES),
        lambda head_dim, groups, types: (head_dim, groups) in SIZES[types],
    ),
    ids=str,
)
def test_every_head_size_and_group_under_all_params(
    head_dim: int, groups: tuple[int, int], types: tuple[torch.dtype, torch.dtype | None]
) -> None:
    """Parts of vectors and all tiles of query heads; contexts that end at borders of blocks, partitions and windows."""
    (heads, _), (dtype, kv_dtype) = groups, types
    rng = random.Random(head_dim + heads)
    batch = random_batch(rng, 16, [1, 1, 1, 20, 33], [1, 128, 145, 48, 33])
    per_head = [tuple(rng.uniform(0, 1) for _ in range(heads)) for _ in range(2)]
    params = {"softcap": 3.0, "slopes": per_head[0], "sinks": per_head[1]}
    for window, names in ((None, ()), (16, ("softcap",)), (17, ("slopes",)), (128, ("sinks",)), (None, params)):
        chosen: Any = {name: params[name] for name in names}
        check(backends(dtype, head_dim, kv_dtype)[-1], batch, groups, head_dim, window, dtype, kv_dtype, **chosen)


@pytest.mark.parametrize("num_queries", [1, 20])
def test_blocks_before_a_window_are_not_read(num_queries: int) -> None:
    """Not even multiplied by zero, or what is in them would show."""
    batch = random_batch(random.Random(0), 16, [num_queries], [200])
    kv = LayerKV(*torch.randn(2, 14, 16, 2, 24, generator=torch.Generator().manual_seed(0)))
    q, k, v = (torch.ones(num_queries, heads, 24) for heads in (4, 2, 2))
    TorchFusedOps().store(k, v, kv, batch.slot_mapping_T)
    for backend in backends(torch.float32, 24):
        step = backend.prepare(batch)
        before = step.attend(q, k, v, kv, AttentionParams(0.2, window=40, sinks=(1.0,) * 4))
        first = (200 - num_queries - 39) // 16
        poisoned = LayerKV(kv.keys.clone(), kv.values.clone())
        for plane in poisoned.planes:
            plane[batch.block_table_RN[0, :first].long()] = float("nan")
        assert torch.equal(step.attend(q, k, v, poisoned, AttentionParams(0.2, window=40, sinks=(1.0,) * 4)), before)


class PaddedAttention(TorchAttention):
    """Decode steps as a graph holds them."""

    def prepare(self, batch: ForwardBatch) -> AttentionStep:
        return PaddedDecode(batch, TorchKVStore())


@pytest.mark.parametrize(
    ("seed", "kv_dtype"),
    rest_in_parity(
        itertools.product(range(6), [None, QUANTIZED[0]]), lambda seed, kv_dtype: (seed < 4) == (kv_dtype is None)
    ),
    ids=str,
)
def test_padded_decodes(seed: int, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one token and rows with drafts, all at once or some tokens at a time, with every kind of score."""
    rng = random.Random(seed)
    monkeypatch.setattr(pieces, "GATHER_BYTES", rng.choice((2**24, 2**15)))
    seq_lens = [rng.choice((1, 2, 17, 40, 130)) for _ in range(6)]
    batch = random_batch(rng, 16, [rng.choice((1, min(4, length))) for length in seq_lens], seq_lens)
    slopes = tuple(2.0 ** -rng.uniform(0, 8) for _ in range(6))
    for window, softcap, own, sinks in (
        (None, None, None, None), (7, None, None, None), (33, 5.0, None, slopes), (None, 2.0, slopes, None),
    ):  # fmt: skip
        check(PaddedAttention(), batch, (6, 2), 32, window, kv_dtype=kv_dtype, softcap=softcap, slopes=own, sinks=sinks)


@pytest.mark.parametrize("kv_dtype", [None, QUANTIZED[0]], ids=str)
def test_the_first_chunk_of_a_prompt_gathers_nothing(
    kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the step's own keys and values; of a quantized cache it must see what was stored."""
    gathered: list[int] = []
    blocks = Gatherer.blocks
    monkeypatch.setattr(Gatherer, "blocks", lambda *args: gathered.append(len(args[2])) or blocks(*args))
    for backend in backends(torch.float32, 32, kv_dtype):
        for seq_len, num_blocks in ((40, 0 if kv_dtype is None else 3), (90, 6)):
            batch = random_batch(random.Random(0), 16, [40], [seq_len])
            check(backend, batch, (4, 2), 32, kv_dtype=kv_dtype)
            assert gathered == ([num_blocks] if num_blocks else [])
            gathered.clear()


@pytest.mark.parametrize(
    ("group", "head_dim"),
    rest_in_parity(
        itertools.product([1, 2, 3, 4, 5], [16, 48, 64, 80, 112, 128]),
        lambda *case: case in {(3, 16), (5, 48), (1, 64), (4, 64), (2, 80), (1, 112), (2, 128), (5, 128)},
    ),
)
def test_bf16_of_every_width_and_group(head_dim: int, group: int) -> None:
    """Pairs of q and k, four scores at a time, even and odd values: at every tail."""
    rng = random.Random(head_dim + group)
    for block_size in (1, 8, 16, 32):
        batch = random_batch(rng, block_size, [1] * 6, [1, 3, 16, 33, 130, 257])
        for backend in backends(torch.bfloat16, head_dim):
            check(backend, batch, (2 * group, 2), head_dim, rng.choice((None, 7, 40)), torch.bfloat16)


WINDOWS = {
    (torch.bfloat16, None): (None, 40),
    (torch.bfloat16, torch.int8): (None, 200),
    (torch.bfloat16, torch.float8_e4m3fn): (None, 1),
    (torch.float16, None): (40,),
    (torch.float16, torch.int8): (200,),
    (torch.float16, torch.float8_e4m3fn): (None,),
}
"""Of half precision, those in make test."""


@pytest.mark.parametrize(
    ("window", "kv_dtype", "dtype"),
    rest_in_parity(
        ((window, kv_dtype, dtype) for window in (None, 1, 40, 200) for dtype, kv_dtype in WINDOWS),
        lambda window, kv_dtype, dtype: window in WINDOWS[dtype, kv_dtype],
    ),
    ids=str,
)
def test_half_precision(dtype: torch.dtype, window: int | None, kv_dtype: torch.dtype | None) -> None:
    batch = random_batch(random.Random(0), 16, [1, 1, 20, 5, 1, 300, 150], [300, 33, 20, 64, 1, 300, 401])
    for backend in backends(dtype, 128, kv_dtype):
        check(backend, batch, (16, 8), 128, window, dtype, kv_dtype)


PIECES = {
    (torch.float32, None): range(6),
    (torch.float32, torch.int8): range(6, 9),
    (torch.bfloat16, None): range(9, 12),
}
"""Seeds in make test."""


@pytest.mark.parametrize(
    ("seed", "dtype", "kv_dtype"),
    rest_in_parity(
        ((seed, *types) for seed in range(12) for types in PIECES), lambda seed, *types: seed in PIECES[types]
    ),
    ids=str,
)
def test_contexts_that_pass_by_in_pieces(
    seed: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few blocks, tiles of a few rows: chunks and decodes, with and without windows, long and short."""
    rng = random.Random(seed)
    monkeypatch.setattr(pieces, "GATHER_BYTES", rng.choice((1, 4096, 20_000)))
    monkeypatch.setattr(pieces, "SCORE_BYTES", rng.choice((1, 2000, 30_000)))
    seq_lens = [rng.choice((1, 2, 17, 40, 130, 300)) for _ in range(rng.randint(1, 6))]
    query_lens = [rng.choice((1, 1, min(3, length), length)) for length in seq_lens]
    window = rng.choice((None, None, 1, 7, 33, 500))
    batch = random_batch(rng, rng.choice((4, 16)), query_lens, seq_lens)
    check(TorchAttention(is_bounded=True), batch, (4, 2), 16, window, dtype, kv_dtype)


class Largest(TorchDispatchMode):
    """The largest tensor that an operation made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        self.num_bytes = max([self.num_bytes, *(tensor.numel() * tensor.element_size() for tensor in made)])
        return output


@pytest.mark.parametrize("num_queries", [1, 24])
def test_bounded_memory_does_not_grow_with_the_context(num_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "GATHER_BYTES", 64 * 1024)
    monkeypatch.setattr(pieces, "SCORE_BYTES", 64 * 1024)
    largest = []
    for seq_len in (2000, 8000):
        batch = random_batch(random.Random(0), 16, [num_queries], [seq_len])
        blocks = int(batch.block_table_RN.max()) + 1
        q, k, v = (torch.randn(num_queries, heads, 16) for heads in (4, 2, 2))
        kv = LayerKV(torch.randn(blocks, 16, 2, 16), torch.randn(blocks, 16, 2, 16))
        step = TorchAttention(is_bounded=True).prepare(batch)
        with Largest() as seen:
            TorchFusedOps().store(k, v, kv, batch.slot_mapping_T)
            step.attend(q, k, v, kv, AttentionParams(0.25))
        own = [kv.keys.nbytes, 64 * 1024, batch.block_table_RN.nbytes * 2]
        assert seen.num_bytes <= max(own), "views of the cache, pieces, and the row's block ids"
        largest.append(seen.num_bytes if seen.num_bytes != kv.keys.nbytes else 0)
    assert largest[0] == largest[1]


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
    assert CpuPlatform().attention(torch.float16, 64).name == "torch-sdpa"
    assert CpuPlatform().attention(torch.float32, 264).name == "torch-sdpa"
    assert CpuPlatform().attention(torch.float32, 24).name == backends(torch.float32, 24)[-1].name
    assert CpuPlatform().attention(torch.bfloat16, 64).name == backends(torch.bfloat16, 64)[-1].name
    for kv_dtype in QUANTIZED:
        assert CpuPlatform().attention(torch.bfloat16, 128, kv_dtype).name == backends(torch.bfloat16, 128)[-1].name
        assert CpuPlatform().attention(torch.float16, 64, kv_dtype).name == "torch-sdpa"


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
def test_a_value_that_is_not_finite_shows(kv_dtype: torch.dtype | None, side: str, what: float) -> None:
    """A non-finite value that a row writes makes that row non-finite, now and in later steps, and no other row.

    Infinite unquantized keys are left out: a score of -inf is legal.
    """
    if kv_dtype is None and side == "keys" and what == float("inf"):
        pytest.skip("legal")
    for backend in backends(torch.float32, 64, kv_dtype):
        q, k, v = (torch.ones(4, heads, 64) for heads in (4, 2, 2))
        (k if side == "keys" else v)[0, :, 5] = what
        storage = kv_dtype or torch.float32
        sides = [encode(torch.zeros(9, 16, 2, 64), storage) for _ in "kv"]
        kv = LayerKV(sides[0][0], sides[1][0], sides[0][1], sides[1][1])
        batch = random_batch(random.Random(0), 16, [3, 1], [3, 40])
        ops = CpuPlatform().fused_ops(torch.float32)
        ops.store(k, v, kv, batch.slot_mapping_T)
        outputs = [backend.prepare(batch).attend(q, k, v, kv, AttentionParams(0.125))]
        later = dataclasses.replace(
            random_batch(random.Random(0), 16, [1, 1], [4, 41]),
            block_table_RN=batch.block_table_RN,
            slot_mapping_T=torch.stack((batch.slot_mapping_T[2] + 1, batch.slot_mapping_T[3] + 1)),
        )
        ops.store(k[2:], v[2:], kv, later.slot_mapping_T)
        outputs.append(backend.prepare(later).attend(q[2:], k[2:], v[2:], kv, AttentionParams(0.125)))
        for out in outputs:  # the first row's last token, which is sampled from, and the other row
            assert not out[-2].isfinite().all(-1).any() and out[-1].isfinite().all()
