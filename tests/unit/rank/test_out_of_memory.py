"""A step that runs out of device memory: alone in its group a rank answers, and the same rows can be planned again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.workers.messages.step import NOT_FINITE, RowInit, RowWork, StepPlan, StepResult
from tandem.workers.models.spec.kv_layout import KVLayout
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.launched_steps import OUT_OF_MEMORY
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.row_table import RowTable
from tests.support.faulty_model import Fault, FaultyModel
from tests.unit.rank.test_model_runner import GREEDY, VOCAB, HashDecoder, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2]
FAULTS: list[Fault] = ["out of memory at once", "out of memory at the end"]


class Planner:
    """Plans of one row on one rank, as an engine makes them."""

    def __init__(self, faults: dict[int, Fault], context: ParallelContext | None = None) -> None:
        self.kv = KVCache.allocate([KVLayout.keys_and_values(1, 1)], 16, 4, torch.float32, CpuPlatform())
        table = RowTable(2, 60, 4, VOCAB)
        model: Any = FaultyModel(HashDecoder(), faults)
        self.runner = ModelRunner(model, context or ParallelContext.single(), self.kv, table, CpuPlatform())
        self.step_id = self.known_failure = 0
        self.counts = (len(PROMPT), 0)
        self.rolled_back: list[tuple[int, int, int]] = []

    def step(self, num_tokens: int, samples: bool, *, ignorant: bool = False, **plan: Any) -> StepResult:
        """ignorant: the plan was made before the failure that arrived last."""
        self.step_id += 1
        first = "new_rows" in plan
        work = RowWork(row=0, num_tokens=num_tokens, samples=samples, new_block_ids=[5, 2, 7] if first else [])
        if not ignorant:
            plan |= {"known_failure": self.known_failure, "rolled_back": self.rolled_back}
            self.rolled_back = []
        result = self.runner.launch(StepPlan(step_id=self.step_id, work=[work], **plan)).result()
        assert result is not None and result.step_id == self.step_id
        if result.failure is None:
            self.counts = (self.counts[0] + samples, self.counts[1] + num_tokens)
        else:
            assert result.rows == []
            self.known_failure, self.rolled_back = self.step_id, [(0, *self.counts)]
        return result

    def tokens(self, count: int) -> Iterator[int]:
        for _ in range(count):
            (row,) = self.step(1, True).rows
            yield row.token_ids[0]


def bind() -> list[RowInit]:
    return [RowInit(row=0, token_ids=PROMPT, prompt_len=len(PROMPT), num_computed=0, sampling=GREEDY)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_prefill_chunk_is_planned_again_in_halves(fault: Fault) -> None:
    planner = Planner({0: fault})
    failure = planner.step(7, True, new_rows=bind()).failure
    assert failure is not None and failure.startswith(f"{OUT_OF_MEMORY} in step 1")
    assert planner.step(3, False).rows == []
    (first,) = planner.step(4, True).rows
    assert [*first.token_ids, *planner.tokens(3)] == expected(PROMPT, 4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_decode_is_planned_again(fault: Fault) -> None:
    planner = Planner({2: fault})
    tokens = planner.step(7, True, new_rows=bind()).rows[0].token_ids + list(planner.tokens(1))
    assert planner.step(1, True).failure is not None
    assert tokens + list(planner.tokens(2)) == expected(PROMPT, 4)


def test_plans_made_in_ignorance_of_the_failure_fail_too_and_later_ones_run() -> None:
    planner = Planner({1: "out of memory at the end"})
    tokens = planner.step(7, True, new_rows=bind()).rows[0].token_ids
    planner.step(1, True)
    late = planner.step(1, True, ignorant=True)
    assert late.failure == "planned before the failure of step 2 was known"
    assert tokens + list(planner.tokens(3)) == expected(PROMPT, 4)


def test_kv_that_a_failed_step_left_is_cleaned_before_anybody_reads_beside_it() -> None:
    """A peer's failure can make it NaN, and attention weighs what it does not use with 0."""
    planner = Planner({1: "out of memory at the end"})
    planner.step(5, False, new_rows=bind())
    planner.step(2, True)
    keys = planner.kv.slab[0].view(-1)
    first = [*range(20, 24), 8, 9, 10]  # blocks 5 and 2
    assert keys[first].tolist() == PROMPT, "the fifth to seventh token are in block 2"
    planner.kv.slab[:, 2, 1:3] = float("nan")
    assert planner.step(1, False).rows == []
    assert keys[first].tolist() == [*PROMPT[:6], 0]
    assert [*planner.tokens(2)] == expected(PROMPT, 2) and planner.kv.slab.isfinite().all()


@pytest.mark.parametrize("copied", [False, True])
def test_what_rejected_drafts_have_left_is_cleaned_though_no_plan_tells_of_them(copied: bool) -> None:
    """With stages a row's next plan says which drafts were rejected. There is none where the row has lost its place
    with its blocks kept, and another choice may begin with a copy of the block before."""
    planner = Planner({})
    planner.runner._appends = False  # as on a stage of several
    planner.step(7, True, new_rows=bind())
    first, second = expected(PROMPT, 2)
    wrong = [(second + 1) % VOCAB, 0]
    work = RowWork(row=0, num_tokens=2, samples=True, token_ids=[first, second], max_drafts=2, draft_ids=wrong)
    result = planner.runner.launch(StepPlan(step_id=2, work=[work])).result()
    assert result is not None and len(result.rows[0].token_ids) == 1, "position 8, and drafts at 9 and 10"
    planner.kv.slab[:, 7, 1:3] = float("nan")
    tokens = [*PROMPT, *expected(PROMPT, 3)]
    init = RowInit(row=1, token_ids=tokens, prompt_len=len(PROMPT), num_computed=9, sampling=GREEDY)
    blocks, copies = ([5, 2, 9], [(7, 9)]) if copied else ([5, 2, 7], [])
    work = RowWork(row=1, num_tokens=1, samples=True, new_block_ids=blocks)
    freed = [] if copied else [0]
    again = StepPlan(step_id=3, work=[work], new_rows=[init], freed_rows=freed, block_copies=copies)
    result = planner.runner.launch(again).result()
    assert result is not None and result.rows[0].token_ids == expected(PROMPT, 4)[3:]
    assert planner.kv.slab[:, blocks].isfinite().all()


def test_blocks_of_a_plan_made_in_ignorance_are_cleaned_and_copied_before_its_answer() -> None:
    """Afterwards they may be given to a load, whose bytes nothing may overwrite."""
    planner = Planner({0: "out of memory at once"})
    planner.kv.slab.fill_(3.0)
    planner.step(7, True, new_rows=bind())
    assert planner.step(1, True, ignorant=True, block_copies=[(1, 9)]).failure is not None
    assert planner.kv.slab[:, 9].eq(3.0).all() and planner.kv.slab[:, 5].eq(0.0).all(), "copied, and cleaned"
    planner.kv.slab[:, 9] = 8.0  # a load
    (first,) = planner.step(7, True).rows
    assert planner.kv.slab[:, 9].eq(8.0).all() and first.token_ids == expected(PROMPT, 1)


def test_a_rank_without_memory_for_a_copy_of_blocks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: KVCache, pairs: list[tuple[int, int]]) -> None:
        raise torch.OutOfMemoryError("no room for a copy")

    monkeypatch.setattr(KVCache, "copy", failing)
    with pytest.raises(torch.OutOfMemoryError):
        Planner({}).step(7, True, new_rows=bind(), block_copies=[(1, 9)])


def test_loads_that_a_failed_step_awaited_are_awaited_by_the_next() -> None:
    """At once, so that it is a step like those of ranks that have not failed."""
    planner, awaited, whole = Planner({0: "out of memory at once"}), [], set()

    class Gate:
        def in_turn(self, layers: Any, tickets: Any, page_of: Any) -> Any:
            awaited.append(list(tickets))
            return layers

        def wait(self, ticket: int, page: int) -> None:
            whole.add((ticket, page))

    planner.runner.gate = Gate()  # type: ignore[assignment]
    planner.step(7, True, new_rows=bind(), awaits=[4])
    assert awaited == [[4]] and not whole
    planner.step(7, True)
    assert whole == {(4, page) for page in planner.runner.kv.page_of}
    whole.clear()
    planner.step(1, True)
    assert awaited == [[4]] and not whole


@pytest.mark.parametrize("forward", [0, 1], ids=["prefill", "decode"])
def test_nan_is_the_rows_own_error(forward: int) -> None:
    planner = Planner({forward: "nan"})
    results = [planner.step(7, True, new_rows=bind()), planner.step(1, True)]
    assert [result.rows[0].error for result in results] == [NOT_FINITE if n == forward else None for n in range(2)]
    assert all(result.failure is None for result in results)
