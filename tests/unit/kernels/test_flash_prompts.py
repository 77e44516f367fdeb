"""Chunks of prompts through gathered contexts: the gather kernel against its twin, whole steps against the reference
with the twin of the flash kernel, and the look at the flash kernel before it is used.

As in test_triton_attention.py, the tests run in the interpreter, in a process of their own.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.attention.prompts.varlen_attention import FlashVarlen, Ragged, SdpaVarlen
from tandem.workers.kernels.kv_store import LayerKV, TorchKVStore, encode
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.planning.budget import ATTENTION_BYTES
from tests.support.attention_check import QUANTIZED, check, random_batch
from tests.support.interpreted import DEVICE, INTERPRETED, computes, run_in_interpreter, starts
from tests.unit.kernels.test_triton_attention import HALVES, on_device

pytest.importorskip("triton")

PROMPTS = "tandem.workers.attention.prompts.flash_prompts"
KINDS = [
    (torch.float32, None), (torch.float32, torch.int8), (torch.float32, torch.float8_e4m3fn),
    *((dtype, kind) for dtype in HALVES for kind in (None, torch.float32, *QUANTIZED)),
]  # fmt: skip
"""Dtypes of queries and of caches."""


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    if INTERPRETED:
        monkeypatch.setattr("tandem.workers.kernels.triton.triton_attention.PROGRAMS", 24)


class Counted(SdpaVarlen):
    """The twin; `calls` has the heads of keys and the rows of each call. is_half: it takes 16-bit queries alone."""

    def __init__(self, *, is_half: bool = False) -> None:
        self.calls: list[tuple[int, int]] = []
        self._is_half = is_half

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        return dtype.itemsize == 2 or not self._is_half

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Ragged, params: Any) -> torch.Tensor:
        self.calls.append((k.shape[1], len(rows.q_starts) - 1))
        assert (
            int(rows.q_starts.diff().max()) == rows.most_queries and int(rows.k_starts.diff().max()) <= rows.most_keys
        )
        return super().attend(q, k, v, rows, params)


def backend(varlen: Any, fewest_queries: int = 18) -> Any:
    from tandem.workers.attention.prompts.flash_prompts import FlashPrompts
    from tandem.workers.attention.triton_paged import TritonAttention

    return TritonAttention(FlashPrompts(varlen, 0, fewest_queries))


def batch_of(query_lens: list[int], seq_lens: list[int], block_size: int = 16) -> ForwardBatch:
    return on_device(random_batch(random.Random(0), block_size, query_lens, seq_lens))


# ---- the gather ----


@computes
@pytest.mark.parametrize(("dtype", "kv_dtype"), KINDS, ids=str)
@pytest.mark.parametrize(("block_size", "dim"), [(16, 16), (5, 24)])
def test_gathered_contexts_are_the_twins(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, block_size: int, dim: int
) -> None:
    """Rows of unlike lengths, also one of none, that begin within blocks; some heads; memory full of NaN, of which all
    that belongs to rows is written and nothing else; a cache full of NaN beside the rows' tokens."""
    from tandem.workers.kernels.triton.triton_gather import gather

    firsts, lengths, heads, first_head = [0, 13, 0, 70, 2], [65, 30, 0, 130, 1], 2, 1
    batch = batch_of([1] * 5, [first + length + 1 for first, length in zip(firsts, lengths, strict=True)], block_size)
    generator = torch.Generator().manual_seed(1)
    shape = (int(batch.block_table_RN.max()) + 2, block_size, 3, dim)
    clean = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in "kv"]
    spoilt = [torch.full_like(plane, torch.nan) for plane in clean]
    slots = [
        int(batch.block_table_RN[row, position // block_size]) * block_size + position % block_size
        for row, (first, length) in enumerate(zip(firsts, lengths, strict=True))
        for position in range(first, first + length)
    ]
    for plane, own in zip(spoilt, clean, strict=True):
        plane.flatten(0, 1)[slots] = own.flatten(0, 1)[slots]
    planes = [encode(plane, kv_dtype or dtype) for plane in spoilt]
    kv = LayerKV.of([codes for codes, _ in planes], [scales for _, scales in planes if scales is not None])
    starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    total = sum(lengths)
    memory = torch.full((2 * total * heads * dim + 1000,), torch.nan, dtype=dtype, device=DEVICE)
    out = memory[: 2 * total * heads * dim].view(2, total, heads, dim)
    gather(kv, starts, torch.tensor(firsts, dtype=torch.int32, device=DEVICE), batch.block_table_RN, out, first_head)
    everything = torch.arange(shape[0], device=DEVICE)
    for found, plane, scales in ((out[0], kv.keys, kv.key_scales), (out[1], kv.values, kv.value_scales)):
        whole = TorchKVStore().gather(plane, scales, everything, torch.empty(shape, dtype=dtype, device=DEVICE))
        assert torch.equal(found, whole.flatten(0, 1)[slots, first_head : first_head + heads])
    assert memory[2 * total * heads * dim :].isnan().all()


# ---- whole steps ----

QUERIES, LENGTHS = [1, 30, 40, 18, 2, 20, 25, 19], [20, 30, 40, 70, 2, 100, 61, 19]
"""Chunks that begin prompts and that continue them, side by side and between decodes."""
PIECES = {
    10**6: [(2, 2), (2, 1), (2, 2), (2, 1)],
    130 * 2: [(2, 2), (2, 1), (2, 1), (2, 1), (2, 1)],
    110: [(2, 2), *[(1, 1)] * 6, (2, 1)],
}
"""Keys of one head that a piece has room for: KV heads and rows of each call."""


@computes
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "window", "room"),
    [
        *((torch.float32, None, None, room) for room in PIECES),
        *((*kind, (5, 33, 500)[place % 3], list(PIECES)[place % 3]) for place, kind in enumerate(KINDS)),
    ],
    ids=str,
)
def test_steps_are_the_references(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, window: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{PROMPTS}.PIECE_BYTES", room * 2 * 16 * dtype.itemsize)
    varlen = Counted()
    check(backend(varlen), batch_of(QUERIES, LENGTHS), (4, 2), 16, window, dtype, kv_dtype)
    assert varlen.calls and (window is not None or varlen.calls == PIECES[room])


@computes
def test_small_chunks_beside_large_ones_are_the_kernels() -> None:
    varlen = Counted()
    check(backend(varlen, fewest_queries=20), batch_of(QUERIES, LENGTHS), (4, 2), 16, kv_dtype=torch.int8)
    assert varlen.calls == [(2, 2), (2, 2)], "30 and 40 queries, 20 and 25; 18 and 19 are left"


@computes
def test_a_step_of_one_piece_is_not_copied() -> None:
    made: list[torch.Tensor] = []

    class Kept(SdpaVarlen):
        def attend(self, *args: Any) -> torch.Tensor:
            made.append(super().attend(*args))
            return made[-1]

    batch = batch_of([20, 30], [40, 50])
    kv = LayerKV(*torch.randn(2, 10, 16, 1, 8, device=DEVICE))
    q = torch.randn(50, 2, 8, device=DEVICE)
    assert backend(Kept()).prepare(batch).attend(q, q[:, :1], q[:, :1], kv, AttentionParams(1.0)) is made[0]


@computes
@pytest.mark.parametrize(
    ("reason", "queries", "lengths", "changes"),
    [
        ("a soft-cap", [20], [40], {"softcap": 3.0}),
        ("slopes", [20], [40], {"slopes": (0.5, 0.2)}),
        ("sinks", [20], [40], {"sinks": (0.5, 0.2)}),
        ("few tokens", [20, 1], [40, 1], {}),
        ("no chunk", [17, 7], [40, 10], {}),
        ("a context that fits no piece", [20, 9], [61, 9], {}),
        ("a dtype", [20, 20], [40, 30], {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_kernel_computes(
    reason: str, queries: list[int], lengths: list[int], changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a piece is there from the first step on whose layers suit, whatever its size."""
    from tandem.workers.attention.prompts.flash_prompts import FlashPrompts
    from tandem.workers.attention.triton_paged import TritonAttention

    monkeypatch.setattr(f"{PROMPTS}.PIECE_BYTES", 60 * 2 * 8 * 4)
    varlen = Counted(is_half=reason == "a dtype")
    prompts = FlashPrompts(varlen, fewest_tokens=22, fewest_queries=18)
    check(TritonAttention(prompts), batch_of(queries, lengths), (2, 1), 8, **changes)
    assert varlen.calls == []
    assert (prompts._memory is not None) == (not changes and reason != "a dtype")


@computes
def test_rows_whose_lengths_the_host_does_not_know_are_the_kernels() -> None:
    from dataclasses import replace

    batch = batch_of([20], [40])
    guessed, varlen = replace(batch, seq_lens_list=[43], spare_lens_list=[3]), Counted()
    kv = LayerKV(*torch.randn(2, 4, 16, 1, 8, device=DEVICE))
    q = torch.randn(20, 2, 8, device=DEVICE)
    wanted, found = (
        backend(varlen).prepare(each).attend(q, q[:, :1], q[:, :1], kv, AttentionParams(1.0))
        for each in (batch, guessed)
    )
    torch.testing.assert_close(found, wanted)
    assert varlen.calls == [(1, 1)]


@computes
def test_a_piece_and_the_parts_of_decodes_are_within_what_is_planned() -> None:
    from tandem.workers.attention.prompts.flash_prompts import PIECE_BYTES
    from tandem.workers.kernels.triton.triton_attention import PARTS_BYTES

    assert PIECE_BYTES + PARTS_BYTES <= ATTENTION_BYTES


# ---- the flash kernel ----


@pytest.fixture
def flash() -> Iterator[FlashVarlen]:
    """The flash kernel; in the interpreter an operator of its name and signature, which does what FlashAttention-2 says
    of cumulative lengths, windows by their left and right, and causal rows of unlike lengths."""
    if not INTERPRETED:
        yield FlashVarlen()
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_of_words, "CPU")
    yield FlashVarlen()
    library._destroy()


def flash_of_words(
    q: Any, k: Any, v: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, *, scale: Any = None, window_size_left: Any = None, window_size_right: Any = None,
    **others: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    assert not (dropout_p or return_debug_mask or any(value is not None for value in others.values()))
    left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
    left, right = -1 if left >= max_k else left, 0 if is_causal else right
    outputs = []
    for row in range(len(cum_q) - 1):
        own, keys = slice(*cum_q[row : row + 2].tolist()), slice(*cum_k[row : row + 2].tolist())
        queries, positions = own.stop - own.start, keys.stop - keys.start
        assert queries <= max_q and positions <= max_k
        back = torch.arange(positions - queries, positions)[:, None] - torch.arange(positions)
        seen = (back >= -right) & ((back <= left) if left >= 0 else True)
        group = q.shape[1] // k.shape[1]
        key, value = (x[keys].float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        scores = (q[own].float().transpose(0, 1) @ key.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        outputs.append((scores.softmax(-1) @ value).transpose(0, 1).to(q.dtype))
    none = torch.empty(0)
    return torch.cat(outputs), none, none, none, none


@computes
@pytest.mark.parametrize(("kv_dtype", "window"), [(None, None), (torch.int8, 1), (None, 33)], ids=str)
def test_the_flash_kernel_gets_what_it_asks_for(
    flash: FlashVarlen, kv_dtype: torch.dtype | None, window: int | None
) -> None:
    for dtype in HALVES:
        check(backend(flash), batch_of([30, 40, 18, 20], [30, 40, 70, 100]), (4, 2), 64, window, dtype, kv_dtype)
    assert flash.takes(torch.bfloat16, 256) and flash.takes(torch.float16, 72)
    assert not any(flash.takes(*of) for of in ((torch.float32, 64), (torch.float16, 264), (torch.float16, 36)))


class Shifted(FlashVarlen):
    """A flash kernel with a fault."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def attend(self, q: Any, k: Any, v: Any, rows: Ragged, params: AttentionParams) -> torch.Tensor:
        if self._fault == "a window" and params.window is not None:
            params = AttentionParams(params.scale, params.window + 1)
        if self._fault == "further chunks" and rows.most_keys > rows.most_queries:
            k, v = k.roll(1, 0), v.roll(1, 0)
        out = super().attend(q, k, v, rows, params)
        return out.fill_(torch.nan) if self._fault == "first chunks" else out


@computes
@pytest.mark.parametrize("kv_dtype", [torch.float16, *QUANTIZED], ids=str)
def test_a_flash_kernel_is_looked_at_before_it_is_used(flash: FlashVarlen, kv_dtype: torch.dtype) -> None:
    from tandem.workers.attention.prompts.flash_probe import flash_obstacle

    asked = DEVICE, torch.float16, 64, kv_dtype
    assert flash_obstacle(flash, *asked) is None
    for fault in ("first chunks", "further chunks", "a window") if kv_dtype is torch.float16 else ():
        found = flash_obstacle(Shifted(fault), *asked)
        assert found is not None and found.startswith(f"{fault}: results differ by "), found


@computes
@pytest.mark.skipif(not INTERPRETED, reason="the device has it")
def test_without_a_flash_kernel_the_reason_is_torchs() -> None:
    from tandem.workers.attention.prompts.flash_probe import flash_obstacle

    found = flash_obstacle(FlashVarlen(), DEVICE, torch.float16, 64, torch.float16)
    assert found is not None and found.startswith("first chunks: NotImplementedError: Could not run"), found
