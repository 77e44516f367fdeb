"""Triton's paged attention against the reference: in its interpreter, and on a CUDA device where one is.

As in test_triton_lora.py, the tests run in a process of their own, whose interpreter multiplies no bf16. New memory is
full of NaN. Decodes' own tests are in test_triton_decode.py.
"""

import dataclasses
import math
import random
from collections.abc import Iterator

import pytest
import torch

from tandem.workers.attention.forward_batch import ForwardBatch, StepShape
from tandem.workers.kernels.kv_store import LayerKV, encode
from tandem.workers.models.spec.arch import AttentionParams
from tests.support.attention_check import QUANTIZED, check, random_batch
from tests.support.decode_work import small_work
from tests.support.interpreted import DEVICE, INTERPRETED, computes, run_in_interpreter, starts
from tests.support.padded_steps import Padded
from tests.support.reference_attention import ReferenceAttention
from tests.support.triton_steps import batch_of, on_device, triton_backend

HALVES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]
KV_HEADS = 1 if INTERPRETED else 2
"""Of three heads each, where another test has other numbers: the interpreter takes twice as long for twice of them."""
pytest.importorskip("triton")


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _small_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_work(monkeypatch):
        yield


def some_batch(rng: random.Random, block_size: int, *, decodes: bool = False) -> ForwardBatch:
    seq_lens = [rng.choice((1, 2, 15, 16, 17, 40, 130)) for _ in range(rng.randint(1, 5))]
    query_lens = [min(length, rng.choice((1, 1, 3, 5) if decodes else (1, 3, 18, length))) for length in seq_lens]
    return on_device(random_batch(rng, block_size, query_lens, seq_lens))


@computes
@pytest.mark.parametrize(
    ("seed", "kv_dtype"),
    [
        (seed, kv_dtype)
        for place, kv_dtype in enumerate((None, *QUANTIZED, torch.float16))
        for seed in ([place % 2] if INTERPRETED else range(12))
    ],
    ids=str,
)
def test_random_steps(seed: int, kv_dtype: torch.dtype | None) -> None:
    """Decodes, drafts and chunks in one step; heads of any number and size; windows; block sizes."""
    rng = random.Random(seed)
    num_kv_heads = rng.choice((1, 2, 3))
    heads = (num_kv_heads * rng.choice((1, 2, 3, 4, 5, 12)), num_kv_heads)
    window, head_dim = rng.choice((None, None, 1, 7, 16, 33, 500)), rng.choice((8, 24, 48, 64, 128))
    check(triton_backend(), some_batch(rng, rng.choice((1, 4, 16))), heads, head_dim, window, kv_dtype=kv_dtype)


@computes
def test_captured_decodes_are_padded() -> None:
    """Through a captured step's tables, made for another batch, with rows that have no token."""
    for batch, window in ((batch_of([5, 1], [140, 65]), None), (batch_of([1] * 5, [3, 99, 16, 200, 64]), 100)):
        sinks = (1.0, -2.0, 3.0, 0.5, 4.0, 2.0)[: 3 * KV_HEADS]
        check(Padded(12), batch, (3 * KV_HEADS, KV_HEADS), 64, window, sinks=sinks)


@computes
def test_chunks_beside_decodes_are_padded() -> None:
    """Rows of padding have sixteen tokens, the last of them fewer; a captured step takes decodes alone too."""
    for batch in (batch_of([3, 20, 1], [150, 20, 40]), batch_of([1, 1], [99, 3])):
        check(Padded(64, has_chunks=True), batch, (2 * KV_HEADS, KV_HEADS), 32)


@computes
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
def test_half_precision(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Decodes; chunks that begin a row and that continue one."""
    for batch in (batch_of([1, 2], [150, 20]), batch_of([70, 18, 3], [70, 90, 40])):
        check(triton_backend(), batch, (4, 1), 128, dtype=dtype, kv_dtype=kv_dtype)


@computes
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kv_dtype", QUANTIZED, ids=str)
def test_small_weights_of_small_values_count(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """One key has most of the weight, thousands of others share the rest: products of weights and scales would vanish
    in fp16. Only values of the many differ from 0."""
    length, dim, blocks = 2048, 16, 128
    keys_BSKD = torch.zeros(blocks, 16, 1, dim)
    keys_BSKD[0, 0] = 1.0
    values_BSKD = torch.full((blocks, 16, 1, dim), 0.02)
    values_BSKD[0, 0] = 0.0
    planes = [encode(x.to(DEVICE, dtype), kv_dtype) for x in (keys_BSKD, values_BSKD)]
    kv = LayerKV(planes[0][0], planes[1][0], planes[0][1], planes[1][1])
    batch = batch_of([1], [length])
    table_RN = torch.arange(blocks, dtype=torch.int32, device=DEVICE)[None]
    batch = dataclasses.replace(batch, block_table_RN=table_RN)
    q_TND = torch.full((1, 2, dim), 10.0 / dim, dtype=dtype, device=DEVICE)
    found = triton_backend().prepare(batch).attend(q_TND, q_TND[:, :1], q_TND[:, :1], kv, AttentionParams(1.0))
    rest = (length - 1) * math.exp(-10.0)
    wanted = torch.full_like(found, 0.02 * rest / (1 + rest))
    torch.testing.assert_close(found, wanted, rtol=3e-2, atol=0)


@computes
def test_what_lies_outside_a_rows_tokens_is_not_read() -> None:
    """NaN in blocks of nobody, behind the ends of rows and ahead of a window; positions fewer than the host says."""
    query_lens, seq_lens, window = [1, 4, 20], [37, 50, 60], 18
    batch = batch_of(query_lens, seq_lens)
    shape = (int(batch.block_table_RN.max()) + 3, 16, 1, 32)
    generator = torch.Generator().manual_seed(1)
    clean = [torch.randn(shape, generator=generator).to(DEVICE) for _ in "kv"]
    spoilt = [torch.full_like(plane, float("nan")) for plane in clean]
    for row, (queries, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for position in range(max(0, length - queries - window + 1), length):
            block = int(batch.block_table_RN[row, position // 16])
            for plane, own in zip(spoilt, clean, strict=True):
                plane[block, position % 16] = own[block, position % 16]
    more = [5, 2, 7]
    guessed = dataclasses.replace(
        batch, seq_lens_list=[length + add for length, add in zip(seq_lens, more, strict=True)], spare_lens_list=more
    )
    q_TND = torch.randn((batch.num_tokens, 4, 32), generator=generator).to(DEVICE)
    params = AttentionParams(0.2, window)
    wanted = ReferenceAttention().prepare(batch).attend(q_TND, q_TND[:, :1], q_TND[:, :1], LayerKV(*clean), params)
    found = triton_backend().prepare(guessed).attend(q_TND, q_TND[:, :1], q_TND[:, :1], LayerKV(*spoilt), params)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@computes
def test_soft_caps_slopes_and_sinks() -> None:
    heads = 3 * KV_HEADS
    slopes, sinks = (0.5, 0.1, 0.9, 0.01, 0.3, 0.7)[:heads], (2.0, -1.0, 3.0, 0.0, 5.0, 1.0)[:heads]
    for softcap, own, sunk, window in (
        (5.0, None, None, 33), (None, slopes, None, None), (None, None, sinks, None), (2.0, slopes, sinks, 33),
    ):  # fmt: skip
        for batch in (batch_of([1, 3], [130, 17]), batch_of([1, 40], [40, 60])):
            check(triton_backend(), batch, (heads, KV_HEADS), 32, window, softcap=softcap, slopes=own, sinks=sunk)


@computes
def test_heads_of_256_elements() -> None:
    for dtype in HALVES:
        check(triton_backend(), batch_of([1, 40], [40, 60]), (4, 2), 256, dtype=dtype)


@computes
def test_one_capture_serves_tables_of_any_width_and_steps_of_any_kind() -> None:
    backend = triton_backend()
    shapes = [StepShape(20, most, blocks) for most in (1, 18) for blocks in (1, 16, 5000)]
    assert {backend.replay_key(shape, None, torch.float32) for shape in shapes} == {()}
