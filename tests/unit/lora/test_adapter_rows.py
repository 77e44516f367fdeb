"""Which tokens of a step use which adapter: RowTable and build_batch against what a plan says, row by row."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.batch import adapter_segments, build_batch
from tandem.workers.rank.row_table import RowTable

CPU = torch.device("cpu")
GREEDY = RowSampling(temperature=0.0)


def bind(row: int, num_tokens: int, slot: int | None) -> RowInit:
    return RowInit(
        row=row, token_ids=[1] * num_tokens, prompt_len=num_tokens, num_computed=0, sampling=GREEDY, adapter_slot=slot
    )


rows = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 3)), st.integers(1, 5), st.booleans()), min_size=1, max_size=9
)


@settings(max_examples=80, deadline=None)
@given(rows, st.randoms())
def test_tokens_and_samples_carry_their_rows_slots(
    drawn: list[tuple[int | None, int, bool]], rng: random.Random
) -> None:
    """More rows than the table was made for; rows in any order; chunks that end before their prompt sample nothing."""
    table = RowTable(4, 64, 8, 50)
    inits = [bind(row, count + (not samples), slot) for row, (slot, count, samples) in enumerate(drawn)]
    order = list(range(len(drawn)))
    rng.shuffle(order)
    work = [RowWork(row=row, num_tokens=drawn[row][1], samples=drawn[row][2], new_block_ids=[row + 1]) for row in order]
    plan = StepPlan(step_id=1, work=work, new_rows=inits)
    table.apply(plan)
    forward = build_batch(plan, table, CpuPlatform().rows(table, None)).forward
    of_tokens = [slot for row in order for slot in [drawn[row][0]] * drawn[row][1]]
    of_samples = [drawn[row][0] for row in order if drawn[row][2]]
    if all(slot is None for slot, *_ in drawn):
        assert forward.adapters is None and forward.sample_adapters is None and table.num_adapted == 0
        return
    for found, wanted in ((forward.adapters, of_tokens), (forward.sample_adapters, of_samples)):
        assert found is not None and found.slots_T.dtype == torch.int32
        assert found.slots_T.tolist() == [-1 if slot is None else slot for slot in wanted]
        spread: list[int | None] = [None] * len(wanted)
        for (first, last, slot), following in zip(found.segments, [*found.segments[1:], None], strict=False):
            assert first < last
            assert following is None or last < following[0] or (last == following[0] and slot != following[2]), (
                "maximal"
            )
            spread[first:last] = [slot] * (last - first)
        assert spread == wanted


def test_a_row_forgets_its_adapter_when_it_is_freed_or_bound_again() -> None:
    table = RowTable(2, 64, 8, 50)
    table.apply(StepPlan(step_id=1, work=[], new_rows=[bind(0, 3, 5), bind(1, 3, None), bind(7, 3, 2)]))
    assert table.num_adapted == 2 and table.adapter_slots[[0, 1, 7]].tolist() == [5, -1, 2]
    table.apply(StepPlan(step_id=2, work=[], freed_rows=[0, 1], new_rows=[bind(7, 3, None)]))
    assert table.num_adapted == 0 and (table.adapter_slots == -1).all()
    table.apply(StepPlan(step_id=3, work=[], freed_rows=[0], new_rows=[bind(0, 3, 1)]))
    assert table.num_adapted == 1
    plan = StepPlan(step_id=4, work=[RowWork(row=7, num_tokens=3, samples=True, new_block_ids=[1])])
    table.apply(plan)
    assert build_batch(plan, table, CpuPlatform().rows(table, None)).forward.adapters is None, (
        "a step whose rows have none costs nothing"
    )


def test_no_rows_no_segments() -> None:
    assert adapter_segments(np.zeros(0, np.int64), np.zeros(1, np.int64)) == []
