"""Triton's decode attention over a list of parts: in its interpreter, and on a CUDA device where one is.

As in test_triton_attention.py, in a process of its own with new memory full of NaN: outputs, lists and sums of parts.
"""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.kernels.kv_store import LayerKV, encode
from tandem.workers.models.spec.arch import AttentionParams
from tandem.workers.planning.budget import MOST_PARTS
from tests.support.attention_check import QUANTIZED, check, random_batch
from tests.support.decode_work import LENGTH, small_work
from tests.support.interpreted import DEVICE, INTERPRETED, computes, rowwise_products, run_in_interpreter, starts
from tests.support.padded_steps import Padded
from tests.support.triton_steps import batch_of, on_device, triton_backend

HALF = torch.float16 if INTERPRETED else torch.bfloat16
SCRATCH = 0
"""The block that belongs to nobody."""

pytest.importorskip("triton")


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


@pytest.fixture(autouse=True)
def _small_work(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with small_work(monkeypatch):
        yield


# ---- what is computed ----


@computes
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, *QUANTIZED], ids=str)
def test_long_rows_beside_short_ones(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """Parts of one row and of several; drafts, also in several tiles; a chunk, which is not listed."""
    if dtype is torch.float32 and kv_dtype is not None:
        pytest.skip("torch computes these")
    batch = batch_of([1, 17, 1, 20, 4, 1], [400, 150, 1, 40, 65, 64])
    check(triton_backend(), batch, (4, 2), 48, dtype=dtype, kv_dtype=kv_dtype)


@computes
def test_a_captured_step_serves_other_rows() -> None:
    """Made for one batch, pointed at others, with rows that have no token; windows that end within a part; sinks."""
    backend = Padded(12)
    for batch, window in (
        (batch_of([5, 1], [140, 65]), None),
        (batch_of([1] * 5, [3, 99, 16, 200, 64]), 100),
        (batch_of([3, 1], [250, 130]), 100),
    ):
        check(backend, batch, (3, 1), 64, window, sinks=(1.0, -2.0, 3.0))


@computes
def test_rows_without_slots_are_computed_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows are cut as there is memory for; others have the same bits, by one program each."""
    results = []
    for most in (MOST_PARTS, 24, 0):
        monkeypatch.setattr("tandem.workers.kernels.triton.triton_decode.MOST_PARTS", most)
        crowd = Crowd(torch.float32, AttentionParams(0.2, 190, sinks=(0.5, -1.0, 2.0, 9.0)))
        step = crowd.step([(0, 300, 1), (1, 200, 5), (2, 129, 1), (3, 20, 2)])
        results.append(step.out_TNV)
        cut = {work.row for work in step.works if work.slot >= 0}
        assert cut == {MOST_PARTS: {0, 1, 2}, 24: {0, 1}, 0: set()}[most]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# ---- one row in any batch ----


class Work(NamedTuple):
    """An item of a list, as list_parts writes it."""

    row: int
    token: int
    stop: int
    position: int
    first_part: int
    stop_part: int
    slot: int


def works_of(step: Any) -> list[Work]:
    """Returns the items of a step's only list."""
    ((items, _),) = step._lists._made.values()
    return [Work(*item[:7]) for item in items[1 : 1 + int(items[0, 0])].tolist()]


class Attended(NamedTuple):
    """The output of a step, and its list."""

    out_TNV: torch.Tensor
    works: list[Work]


class Crowd:
    """Rows whose queries, keys and values depend on row and position alone, in any steps."""

    def __init__(self, dtype: torch.dtype, params: AttentionParams, kv_dtype: torch.dtype | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        rows, length, block_size, heads, kv_heads, dim = 5, 320, 16, 4, 1, 24
        self._params = params
        self._queries_RJND = torch.randn((rows, length, heads, dim), generator=generator).to(DEVICE, dtype)
        self._table_RN = torch.randperm(rows * length // block_size, generator=generator).view(rows, -1).int()
        shape = (rows * length // block_size, block_size, kv_heads, dim)
        planes = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in "kv"]
        (keys, key_scales), (values, value_scales) = (encode(plane, kv_dtype or dtype) for plane in planes)
        self.kv = LayerKV(keys, values, key_scales, value_scales)
        self._backend = triton_backend()

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> ForwardBatch:
        """rows: each with its number, its length and how many of its last tokens are the step's."""
        lens, counts = [length for _, length, _ in rows], [count for _, _, count in rows]
        batch = random_batch(random.Random(0), 16, counts, lens)
        return on_device(dataclasses.replace(batch, block_table_RN=self._table_RN[[row for row, _, _ in rows]]))

    def step(self, rows: Sequence[tuple[int, int, int]], step: Any = None) -> Attended:
        """step: for this batch, of another backend than the crowd's."""
        step = step or self._backend.prepare(self.batch(rows))
        q_TND = torch.cat([self._queries_RJND[row, length - count : length] for row, length, count in rows])
        out_TNV = step.attend(q_TND, q_TND[:, :1], q_TND[:, :1], self.kv, self._params)
        return Attended(out_TNV, works_of(step))

    def by_one_program(self, rows: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """The same on a device with one multiprocessor, which has room for one program."""
        from tandem.workers.attention.triton_paged import Multiprocessors, TritonAttention

        return self.step(rows, TritonAttention(Multiprocessors(1, 0)).prepare(self.batch(rows))).out_TNV

    def padded(self, rows: Sequence[tuple[int, int, int]], num_tokens: int) -> torch.Tensor:
        """The same through a captured step with more room."""
        batch = self.batch(rows)
        backend = Padded(num_tokens)
        q_TND = torch.cat([self._queries_RJND[row, length - count : length] for row, length, count in rows])
        return backend.prepare(batch).attend(q_TND, q_TND[:, :1], q_TND[:, :1], self.kv, self._params)


ALL = AttentionParams(0.3, None, 5.0, (0.5, 0.1, 0.9, 0.01), (1.0, -2.0, 3.0, 0.5))


@computes
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "params"),
    [
        (torch.float32, None, ALL),
        (HALF, None, AttentionParams(0.3, 100, sinks=ALL.sinks)),
        (HALF, torch.int8, AttentionParams(0.3)),
    ],
    ids=["float32 all", "half window", "half int8"],
)
@pytest.mark.parametrize(("row", "length"), [(0, 257), (1, 64)], ids=["long", "short"])
def test_a_query_has_the_same_bits_in_any_batch(
    row: int,
    length: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    params: AttentionParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone; behind others, long and short; as one of its row's drafts, in tiles with a part more; beside a chunk; in a
    captured step with padding; by one program."""
    rowwise_products(monkeypatch)
    crowd = Crowd(dtype, params, kv_dtype)
    alone = crowd.step([(row, length, 1)]).out_TNV[0]
    for rows, place in (
        ([(3, 200, 1), (row, length, 1), (4, 33, 2)], 1),
        ([(3, 7, 1), (row, length + 3, 9)], 6),
        ([(row, length + 16, 17)], 0),
        ([(4, 40, 30), (row, length, 1)], 30),
    ):
        assert torch.equal(crowd.step(rows).out_TNV[place], alone), (row, rows)
    assert torch.equal(crowd.padded([(4, 5, 2), (row, length, 1)], 8)[2], alone)
    assert torch.equal(crowd.by_one_program([(row, length, 1), (3, 70, 1)])[0], alone)


# ---- lists ----


@computes
def test_one_long_row_is_cut_like_all_others() -> None:
    """Each position of each row in one item, none longer than a part; the whole parts first."""
    from tandem.workers.kernels.triton.triton_decode import WorkLists

    lens = [500] * 40 + [100_000] + [500] * 23
    lens = lens if not INTERPRETED else [70] * 40 + [3_000] + [60] * 23
    starts = torch.arange(65, dtype=torch.int32, device=DEVICE)
    lists = WorkLists(starts, torch.tensor(lens, device=DEVICE) - 1, range(1, 18))
    items, merges = lists.of(0, 4, LENGTH, MOST_PARTS)
    works = [Work(*item[:7]) for item in items[1 : 1 + int(items[0, 0])].tolist()]
    wanted = {(row, part) for row, length in enumerate(lens) for part in range(-(-length // LENGTH))}
    assert {(work.row, work.first_part) for work in works} == wanted and len(works) == len(wanted)
    assert all(work.stop_part == work.first_part + 1 for work in works)
    lengths = [min(lens[work.row], work.stop_part * LENGTH) - work.first_part * LENGTH for work in works]
    whole = sum(-(-length // LENGTH) - 1 for length in lens)
    assert all(length == LENGTH for length in lengths[:whole])
    slots = sorted(work.slot for work in works if work.slot >= 0)
    assert slots == list(range(len(slots)))
    assert merges[:, 0].tolist() == [0 if length <= LENGTH else -(-length // LENGTH) for length in lens]


@computes
def test_a_list_has_rows_of_few_queries_alone() -> None:
    """Rows without a token and chunks are in none; drafts are, in tiles, and windows leave out what is not seen."""
    from tandem.workers.kernels.triton.triton_decode import WorkLists

    starts = torch.tensor([0, 1, 19, 24, 24, 24], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([130, *range(100, 118), *range(300, 305)], device=DEVICE)
    items, merges = WorkLists(starts, positions, range(1, 18)).of(200, 4, LENGTH, MOST_PARTS)
    works = [Work(*item[:7]) for item in items[1 : 1 + int(items[0, 0])].tolist()]
    of_first = [Work(0, 0, 1, 130, part, part + 1, part) for part in range(3)]
    of_drafts = [
        Work(2, token, 24, 281 + token, part, part + 1, 3 + 5 * (part - 1) + token - 19)
        for part in range(1, 5)
        for token in (19, 23)
    ]
    assert sorted(works) == sorted(of_first + of_drafts)
    assert merges[:, 0].tolist() == [3, 0, 4, 0, 0] and merges[2, :4].tolist() == [4, 19, 5, 3]


# ---- captured steps ----


@computes
def test_sums_of_parts_stay_where_they_are() -> None:
    """Allocated with a backend's first step, of whatever kind; all layers and steps have the same memory."""
    backend = triton_backend()
    assert backend._kept._parts is None
    backend.prepare(batch_of([20], [20]))
    address = backend._kept.parts(DEVICE).data_ptr()
    check(backend, batch_of([1, 3], [200, 80]), (2, 1), 32)
    assert backend._kept.parts(DEVICE).data_ptr() == address
