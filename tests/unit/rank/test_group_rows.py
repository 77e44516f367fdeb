"""Ranks whose layers have groups: block tables of each group on both kinds of devices, and the memory they share."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.models.spec.kv_layout import KVLayout, described
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tandem.workers.platforms.tensor_rows import TensorRows
from tandem.workers.rank.batch import build_batch
from tandem.workers.rank.kv_cache import KVCache, block_bytes
from tandem.workers.rank.row_table import RowTable

CPU, NO_BLOCK = torch.device("cpu"), -1
GREEDY = RowSampling(temperature=0.0)
LENGTHS = (40, 23, 31)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([(None, 5), (3,), (7, 2, None)]), st.booleans())
def test_each_group_has_its_table_and_no_block_that_a_window_has_passed(
    data: st.DataObject, size: int, windows: tuple[int | None, ...], on_device: bool
) -> None:
    """Rows begin behind a prefix hit, whose entries ahead of the windows name no block, and grow in chunks."""
    table = RowTable(len(LENGTHS), 100, size, 50, windows=windows)
    rows = TensorRows(table, HostAccelerator(), CPU) if on_device else CpuPlatform().rows(table, None)
    blocks: list[list[list[int]]] = [[[] for _ in windows] for _ in LENGTHS]
    computed = [data.draw(st.integers(0, (length - 1) // size)) * size for length in LENGTHS]
    next_block = 100

    def grow(row: int, end: int) -> list[int]:
        nonlocal next_block
        added = []
        for place in range(len(blocks[row][0]), -(-end // size)):
            for group, window in enumerate(windows):
                passed = window is not None and (place + 1) * size <= computed[row] - window + 1
                blocks[row][group].append(NO_BLOCK if passed else next_block)
                next_block += 1
                added.append(blocks[row][group][-1])
        return added

    inits = [
        RowInit(row=row, token_ids=[1] * length, prompt_len=length, num_computed=computed[row], sampling=GREEDY)
        for row, length in enumerate(LENGTHS)
    ]
    for step in range(4):
        ready = [row for row, length in enumerate(LENGTHS) if computed[row] < length]
        work, begins = [], []
        for row in data.draw(st.permutations(ready)):
            count = data.draw(st.integers(1, LENGTHS[row] - computed[row]))
            added = grow(row, computed[row] + count)
            work.append(RowWork(row=row, num_tokens=count, samples=False, new_block_ids=added))
            begins.append(computed[row])
            computed[row] += count
        if not work:
            return
        table.apply(StepPlan(step_id=step, work=work, new_rows=inits if not step else []))
        batch = build_batch(StepPlan(step_id=step, work=work), table, rows).forward
        for group, window in enumerate(windows):
            own = batch.of_group(group)
            assert own.block_table_RN.stride(1) == own.slot_mapping_T.stride(0) == 1
            assert own.block_table_RN.dtype == torch.int32 and own.slot_mapping_T.dtype == torch.int64
            slots = [
                blocks[one.row][group][p // size] * size + p % size
                for one, begin in zip(work, begins, strict=True)
                for p in range(begin, begin + one.num_tokens)
            ]
            assert own.slot_mapping_T.tolist() == slots
            for place, (one, begin) in enumerate(zip(work, begins, strict=True)):
                first = 0 if window is None else max(0, begin - window + 1) // size
                used, ids = -(-(begin + one.num_tokens) // size), own.block_table_RN[place].tolist()
                seen = blocks[one.row][group][first:used]
                assert ids[first:used] == seen and NO_BLOCK not in seen
                assert {*ids} <= {*seen}, "a block that the row does not see any more, or another's"


class Compared(np.ndarray[Any, Any]):
    """Block ids that count how many are compared with others."""

    count = 0

    def __ne__(self, other: object) -> Any:
        Compared.count += self.size
        return super().__ne__(other)


def test_only_changes_of_block_tables_are_looked_for() -> None:
    """Rows of 4,000 blocks whose steps bring few: a row's tables are compared from its first change on."""
    size, blocks, windows = 4, 4000, (None, 5)
    table = RowTable(3, blocks * size, size, 50, windows=windows)
    table.block_ids = table.block_ids.view(Compared)
    rows = TensorRows(table, HostAccelerator(), CPU)
    ids = {row: list(range(10_000 * row, 10_000 * row + 2 * blocks)) for row in range(3)}

    def compared(works: list[RowWork], **more: Any) -> int:
        Compared.count = 0
        table.apply(StepPlan(step_id=1, work=works, **more))
        batch = build_batch(StepPlan(step_id=1, work=works), table, rows).forward
        for place, work in enumerate(works):
            count = int(table.num_blocks[work.row])
            assert batch.of_group(0).block_table_RN[place, :count].tolist() == ids[work.row][: 2 * count : 2]
        return Compared.count

    def work(row: int, **more: Any) -> RowWork:
        return RowWork(row=row, num_tokens=1, samples=False, **more)

    inits = [
        RowInit(row=row, token_ids=[1] * (16_000 - 9), prompt_len=9, num_computed=15_940, sampling=GREEDY)
        for row in range(3)
    ]
    first = 2 * (blocks - 9)
    bound = [work(row, new_block_ids=ids[row][:first]) for row in range(3)]
    assert compared(bound, new_rows=inits) == 3 * first
    assert compared([work(row) for row in range(3)]) == 0
    assert compared([work(0), work(1, new_block_ids=ids[1][first : first + 2]), work(2)]) == 2
    ids[2][first - 6] = 77_777
    assert compared([work(0), work(2, replaced_blocks=[(first - 6, 77_777)])]) == 6
    ids[0] = ids[0][:6] + [0] * (len(ids[0]) - 6)
    again = RowInit(row=0, token_ids=[1] * 12, prompt_len=9, num_computed=0, sampling=GREEDY)
    assert compared([work(0, new_block_ids=ids[0][:6])], freed_rows=[0], new_rows=[again]) == 6
    assert compared([work(0), work(1), work(2)]) == 0
    with pytest.raises(torch.OutOfMemoryError), rows.forgetting():
        raise torch.OutOfMemoryError
    assert compared([work(1)]) == first + 2


def test_layers_of_different_groups_share_memory_and_others_do_not() -> None:
    layout = KVLayout.keys_and_values(2, 8)
    layouts = [KVLayout(layout.planes, group) for group in (1, 2, 0, 1, 2, 0, 1)]
    kv = KVCache.allocate(layouts, 5, 4, torch.float32, CpuPlatform())
    assert kv.page_of == (0, 0, 0, 1, 1, 1, 2) and len(kv.pages) == 3
    assert kv.nbytes == 5 * block_bytes(layouts, 4, torch.float32) == 5 * 3 * block_bytes([layout], 4, torch.float32)
    memory = [layer.keys.data_ptr() for layer in kv.tensors.layers]
    assert memory[0] == memory[1] == memory[2] != memory[3] == memory[4] == memory[5] != memory[6]
    assert [layer.group for layer in kv.tensors.layers] == [1, 2, 0, 1, 2, 0, 1]
    assert sum(plane.nbytes for plane in kv.planes) == kv.nbytes, "copies to lower tiers take each byte once"
    assert described(layouts) != described([layout] * 7), "a stored block of another division is not read"
