"""RowTable and build_batch against a row-by-row model of what a plan means."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.configs.schema import SpeculativeSettings
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.kernels.step_arrays import Array
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tandem.workers.platforms.device_rows import DeviceRows, Ints
from tandem.workers.platforms.step_buffer import StepBuffer
from tandem.workers.platforms.tensor_rows import TensorRows
from tandem.workers.rank.batch import build_batch, preparing
from tandem.workers.rank.drafts import Drafts
from tandem.workers.rank.row_table import RowTable
from tandem.workers.speculation.ngram_on_device import NgramOnDevice

CPU = torch.device("cpu")
GREEDY = RowSampling(temperature=0.0)
READING = RowSampling(temperature=0.0, presence_penalty=1.0)
"""Its tokens are read on the device."""
VOCAB = 50


@dataclass
class NaiveRow:
    tokens: list[int]
    computed: int
    blocks: list[int] = field(default_factory=list)


def init(row: int, tokens: list[int], computed: int = 0, sampling: RowSampling = GREEDY) -> RowInit:
    return RowInit(row=row, token_ids=tokens, prompt_len=len(tokens), num_computed=computed, sampling=sampling)


def compare(
    plan: StepPlan, table: RowTable, device_rows: DeviceRows, rows: dict[int, NaiveRow], block_size: int
) -> None:
    """Applies the plan to both; every tensor must say the same."""
    table.apply(plan)
    prepare = preparing(table, TorchSampling(), is_ahead=device_rows.is_ahead)
    batch = build_batch(plan, table, device_rows, prepare=prepare)
    ids, positions, slots, starts, lens, logits_rows = [], [], [], [0], [], []
    for work in plan.work:
        row = rows[work.row]
        row.tokens += work.token_ids
        row.blocks += work.new_block_ids
        for index, block in work.replaced_blocks:
            row.blocks[index] = block
        for position in range(row.computed, row.computed + work.num_tokens):
            ids.append(row.tokens[position])
            positions.append(position)
            slots.append(row.blocks[position // block_size] * block_size + position % block_size)
        row.computed += work.num_tokens
        starts.append(len(ids))
        lens.append(row.computed)
        if work.samples:
            logits_rows.append(len(ids) - 1)
    if batch.sampling is not None and (read_rows := batch.sampling.read_rows) is not None:
        for row in read_rows.tolist():
            known = rows[row].tokens
            assert device_rows.tokens[row, : len(known)].tolist() == known, "in flight or read, the device has them"
    forward = batch.forward
    assert forward.input_ids_T.tolist() == ids
    assert forward.positions_T.tolist() == positions
    assert forward.slot_mapping_T.tolist() == slots
    assert forward.query_starts.tolist() == starts
    assert forward.seq_lens.tolist() == lens == forward.seq_lens_list
    assert forward.logits_rows_S.tolist() == logits_rows
    assert forward.query_lens_list == [w.num_tokens for w in plan.work]
    assert forward.num_tokens == len(ids)
    assert batch.sample_rows_S.tolist() == [w.row for w in plan.work if w.samples]
    assert batch.sample_positions_S.tolist() == [rows[w.row].computed for w in plan.work if w.samples]
    for place, work in enumerate(plan.work):
        used, table_N = -(-lens[place] // block_size), forward.block_table_RN[place].tolist()
        assert table_N[:used] == rows[work.row].blocks[:used]
        assert {*table_N[used:]} <= {*rows[work.row].blocks}, "beyond its blocks a row has none of another's"
    for name in ("input_ids_T", "positions_T", "slot_mapping_T", "logits_rows_S"):
        assert getattr(forward, name).dtype == torch.int64
    for name in ("query_starts", "seq_lens", "block_table_RN"):
        assert getattr(forward, name).dtype == torch.int32


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 4, 16]), st.booleans())
def test_any_course_of_plans(data: st.DataObject, block_size: int, on_device: bool) -> None:
    """Rows are bound (beyond the table's capacity too), grow in chunks, sample, are replaced and freed. On a device the
    host learns tokens of one step while the next one is made."""
    table = RowTable(2, 200, block_size, VOCAB)
    device_rows: DeviceRows = CpuPlatform().rows(table, None)
    if on_device:
        device_rows = TensorRows(table, HostAccelerator(), CPU, keeps_tokens=True)
    late: list[tuple[Ints, list[int], Ints]] = []
    rows: dict[int, NaiveRow] = {}
    next_block = 0
    for step in range(5):
        new_rows, freed = [], []
        for row in range(5):
            if row not in rows or data.draw(st.integers(0, 5)) == 0:
                tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30))
                computed = data.draw(st.integers(0, len(tokens) - 1))
                rows[row] = NaiveRow(list(tokens), computed)
                new_rows.append(init(row, tokens, computed, READING if row % 2 else GREEDY))
                freed += [row] if data.draw(st.booleans()) else []
        work = []
        for row in data.draw(st.lists(st.sampled_from(sorted(rows)), min_size=1, unique=True)):
            naive = rows[row]
            news = [data.draw(st.integers(0, VOCAB - 1))] if naive.computed == len(naive.tokens) else []
            behind = len(naive.tokens) + len(news) - naive.computed
            num_tokens = data.draw(st.integers(1, behind))
            need = -(-(naive.computed + num_tokens) // block_size) - len(naive.blocks)
            added = list(range(next_block, next_block + max(0, need)))
            next_block += len(added)
            replaced = [(0, next_block)] if naive.blocks and data.draw(st.booleans()) else []
            next_block += len(replaced)
            work.append(
                RowWork(
                    row=row,
                    num_tokens=num_tokens,
                    samples=num_tokens == behind,
                    new_block_ids=added,
                    token_ids=news,
                    replaced_blocks=replaced,
                )
            )
        plan = StepPlan(step_id=step, work=work, new_rows=new_rows, freed_rows=freed)
        compare(plan, table, device_rows, rows, block_size)
        for entry in late:
            live = np.flatnonzero(table.lives[entry[0]] == entry[2])
            table.fill(entry[0][live], np.array(entry[1])[live])
        late.clear()
        if not (appended := [w.row for w in work if w.samples]) or not data.draw(st.booleans()):
            continue
        at, ids = np.array(appended, np.int64), data.draw(st.permutations(range(len(appended))))
        device_rows.append(torch.tensor(ids))
        table.reserve(at)
        late.append((at, ids, table.lives[at]))
        if not on_device or data.draw(st.booleans()):
            table.fill(at, late.pop()[1])
        for row, token in zip(appended, ids, strict=True):
            rows[row].tokens.append(token)


@pytest.mark.parametrize("guessed", [True, False])
def test_what_is_read_on_a_device_has_the_drafts_behind_the_known_tokens(guessed: bool) -> None:
    """Those that the device guesses and those of the host, beside a row without; rejected ones give way to what was
    sampled, and what the host appends comes too."""
    table, prompt = RowTable(2, 40, 4, VOCAB), [7, 8, 9, 7, 8]
    guess = NgramOnDevice(SpeculativeSettings(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2))
    rows = TensorRows(table, HostAccelerator(), CPU, guess if guessed else None, keeps_tokens=True)
    prepare = preparing(table, TorchSampling(), is_ahead=True)
    inits = [init(row, prompt[: 5 - row], 4 - row, READING) for row in range(2)]
    work = [
        RowWork(
            row=row, num_tokens=1, samples=True, new_block_ids=[4 * row + n for n in range(4)], max_drafts=3 - 3 * row
        )
        for row in range(2)
    ]
    plan = StepPlan(step_id=1, work=work, new_rows=inits)
    table.apply(plan)
    if not guessed:
        table.draft(0, [9, 7, 8])
    drafts = Drafts.on_device(plan) if guessed else Drafts(np.array([3, 0]), {0: [9, 7, 8]})
    batch = build_batch(plan, table, rows, drafts, prepare)
    assert rows.tokens[0, :8].tolist() == [*prompt, 9, 7, 8] and rows.tokens[1, :4].tolist() == prompt[:4]
    assert batch.sampling is not None and batch.sampling.read_rows is not None
    rows.append(torch.tensor([9, 5, 6, 6, 3]))  # one draft is accepted
    table.reserve(np.arange(2))
    for row, tokens in ((0, [9, 5]), (1, [3])):
        table.accept(row, tokens, 3 - 3 * row)
    known = [[*prompt, 9, 5], [*prompt[:4], 3]]
    for step in (2, 3):
        more = [RowWork(row=row, num_tokens=2, samples=True, token_ids=[11]) for row in range(2)]
        plan = StepPlan(step_id=step, work=more)
        table.apply(plan)
        build_batch(plan, table, rows, None, prepare)
        for row, tokens in enumerate(known):
            tokens.append(11)
            assert rows.tokens[row, : len(tokens)].tolist() == tokens, step
            tokens.append(20 + step)
        rows.append(torch.tensor([20 + step] * 2))
        table.reserve(np.arange(2))
        table.fill(np.arange(2), [20 + step] * 2)


@pytest.mark.parametrize("tokens", [[9, 7, 3], [5], [9, 7, 8, 4]], ids=["some", "none", "all"])
def test_stages_learn_from_the_next_plan_which_drafts_were_accepted(tokens: list[int]) -> None:
    """Their KV counts as computed, that of the others is named. The last stage counts them ahead while it guesses."""
    table, drafts = RowTable(1, 40, 4, VOCAB), [9, 7, 8]
    work = RowWork(row=0, num_tokens=1, samples=True, new_block_ids=[5, 3, 8], max_drafts=3, draft_ids=drafts)
    plan = StepPlan(step_id=1, work=[work], new_rows=[init(0, [1, 2, 3, 4, 5], 4)])
    table.apply(plan)
    own = Drafts.of_plan(plan, table)
    assert own is not None and own.ids == {0: drafts} and own.total == 3
    batch = build_batch(plan, table, CpuPlatform().rows(table, None), own)
    assert batch.forward.input_ids_T.tolist() == [5, *drafts]
    with table.ahead({0: tokens}):
        assert table.known(0).tolist() == [1, 2, 3, 4, 5, *tokens]
        assert table.num_computed[0] == 4 + len(tokens)
    assert (table.num_known[0], table.num_computed[0]) == (5, 5)
    told = StepPlan(step_id=2, work=[RowWork(row=0, num_tokens=1, samples=True, token_ids=tokens)])
    rejected = table.take_told(told)
    assert rejected.tolist() == [13, 14, 15][len(tokens) - 1 :], "slots of the block of positions 4 to 7"
    table.apply(told)
    assert table.known(0).tolist() == [1, 2, 3, 4, 5, *tokens]
    batch = build_batch(told, table, CpuPlatform().rows(table, None))
    assert batch.forward.positions_T.tolist() == [4 + len(tokens)]
    assert not len(table.take_told(told)), "a step without drafts"


def test_history_is_prompt_and_output() -> None:
    table = RowTable(1, 20, 4, VOCAB)
    table.apply(StepPlan(step_id=1, work=[], new_rows=[init(0, [3, 4])]))
    row = np.array([0])
    table.reserve(row)
    table.fill(row, [9])
    tokens, prompt_len = table.history(0, 3)
    assert (tokens.tolist(), prompt_len) == ([3, 4, 9], 2)
    table.draft(0, [5, 6])
    assert table.known(0).tolist() == [3, 4, 9], "drafts are not known"
    assert table.history(0, 4)[0].tolist() == [3, 4, 9, 5]
    assert table.history(0, 2)[0].tolist() == [3, 4], "what was chosen at a position does not count for it"


def test_a_row_with_foreign_tokens_is_marked_and_forgotten_when_freed() -> None:
    table = RowTable(2, 20, 4, VOCAB)
    table.apply(StepPlan(step_id=1, work=[], new_rows=[init(0, [3, VOCAB]), init(1, [-1])]))
    assert "50" in table.errors[0] and "-1" in table.errors[1]
    table.apply(StepPlan(step_id=2, work=[], new_rows=[init(1, [1])], freed_rows=[0]))
    assert table.errors == {}


@pytest.mark.parametrize(
    "work",
    [
        RowWork(row=0, num_tokens=3, samples=True, new_block_ids=[0]),
        RowWork(row=0, num_tokens=1, samples=True, new_block_ids=[0]),
        RowWork(row=0, num_tokens=2, samples=True),
        RowWork(row=0, num_tokens=0, samples=False, new_block_ids=[0]),
    ],
    ids=["unknown tokens", "samples too early", "no blocks", "no tokens"],
)
def test_impossible_plans_are_caught(work: RowWork) -> None:
    table = RowTable(1, 20, 4, VOCAB)
    plan = StepPlan(step_id=1, work=[work], new_rows=[init(0, [1, 2])])
    table.apply(plan)
    with pytest.raises(AssertionError, match="row 0"):
        build_batch(plan, table, CpuPlatform().rows(table, None))


def test_one_copy_keeps_values_shapes_and_types() -> None:
    buffer, places = StepBuffer(HostAccelerator(), CPU), set()
    for size in (3, 1, 7):
        arrays: list[Array] = [np.arange(size), np.arange(0), np.arange(6, dtype=np.int32).reshape(2, 3)]
        arrays += [np.linspace(0, 1, size), np.ones(size, np.float32)]
        tensors = buffer.fill(arrays)
        assert [t.tolist() for t in tensors] == [a.tolist() for a in arrays]
        assert [t.dtype for t in tensors] == [torch.int64, torch.int64, torch.int32, torch.float64, torch.float32]
        assert all(t.storage_offset() * t.itemsize % 16 == 0 for t in tensors), "Triton compiles for one alignment"
        places.add(tensors[0].data_ptr())
    assert len(places) == 1, "one buffer for all steps"


class NeverRead(HostAccelerator):
    """A device that has read no copy yet."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[torch.Tensor] = []

    def upload(self, host: torch.Tensor, target: torch.Tensor) -> None:
        self.hosts.append(host)

    def event(self, *, timed: bool = False) -> Any:
        return SimpleNamespace(is_done=lambda: False)


def test_a_step_neither_waits_for_the_device_nor_overwrites_what_it_has_not_read() -> None:
    accelerator = NeverRead()
    buffer = StepBuffer(accelerator, CPU)
    for step in range(11):
        buffer.fill([np.array([step])])
    assert [int(host.view(torch.int64)[0]) for host in accelerator.hosts] == list(range(11))
