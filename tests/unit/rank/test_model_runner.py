"""ModelRunner with a decoder whose next token is a hash of what it reads back through the KV blocks.

So a wrong position, slot, block table, copy or computed count changes the text.
"""

from collections import deque
from collections.abc import Sequence

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan, StepResult
from tandem.workers.models.spec.kv_layout import KVLayout
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.row_table import RowTable
from tests.support.executor_driver import ExecutorDriver, Job
from tests.support.platforms import NoGraphs

VOCAB = 97
CPU = torch.device("cpu")
GREEDY = RowSampling(temperature=0.0)


def next_token(context: list[int]) -> int:
    value = 7
    for position, token in enumerate(context):
        value = (value * 31 + token * (position + 1)) % 1_000_003
    return value % VOCAB


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class HashDecoder:
    """Writes each token into its KV slot, reads each row's context back from its blocks."""

    graphs = NoGraphs()
    poison: int | None = None

    def forward(
        self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None, passed: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        assert hidden_TH is None
        kv.layers[0].keys.view(-1)[batch.slot_mapping_T] = batch.input_ids_T.float()
        ends = batch.query_starts[1:].tolist()
        logits_SV = torch.zeros(len(batch.logits_rows_S), VOCAB)
        for place, at in enumerate(batch.logits_rows_S.tolist()):
            row = sum(end <= at for end in ends)
            length = batch.seq_lens_list[row] - (ends[row] - 1 - at)  # behind it come drafts
            assert int(batch.positions_T[at]) == length - 1
            context = kv.layers[0].keys[batch.block_table_RN[row].long()].reshape(-1)[:length].long().tolist()
            logits_SV[place, next_token(context)] = float("nan") if context[0] == self.poison else 9.0
        return logits_SV


class RunnerExecutor:
    """Executor around one ModelRunner."""

    def __init__(self, block_size: int, num_blocks: int = 64) -> None:
        self.decoder = HashDecoder()
        self.kv = KVCache.allocate(
            [KVLayout.keys_and_values(1, 1)], num_blocks, block_size, torch.float32, CpuPlatform()
        )
        table = RowTable(2, 200, block_size, VOCAB)
        self.runner = ModelRunner(self.decoder, ParallelContext.single(), self.kv, table, CpuPlatform())
        self.plans: deque[StepPlan] = deque()
        self.ready = ExecutorReady(
            num_blocks=num_blocks,
            pipeline_parallel_size=1,
            device="cpu",
            dtype="float32",
            threads=1,
            weight_bytes=0,
            block_bytes=0,
            load_s=0.0,
        )

    def start(self) -> ExecutorReady:
        return self.ready

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def poll(self, timeout_s: float) -> StepResult | None:
        return self.runner.launch(self.plans.popleft()).result()

    def close(self) -> None: ...


@pytest.mark.parametrize(("depth", "ahead"), [(1, False), (3, True)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_generates_the_tokens_of_the_definition(block_size: int, depth: int, ahead: bool) -> None:
    executor = RunnerExecutor(block_size, num_blocks=128)
    prompts = [[1], list(range(20)), [5] * 7, [9, 8]]
    driver = ExecutorDriver(executor, executor.ready, block_size)
    for _ in range(2):  # rows and blocks are used again
        jobs = [Job(prompt, 6 + i) for i, prompt in enumerate(prompts)]
        got = driver.generate(jobs, chunk=5, depth=depth, ahead=ahead)
        assert got == [expected(prompt, 6 + i) for i, prompt in enumerate(prompts)]


def test_tokens_given_by_the_plan_replace_own_knowledge() -> None:
    """A resumed row: known tokens beyond the computed ones, KV of the first from earlier blocks."""
    executor = RunnerExecutor(4)
    bind = [RowInit(row=0, token_ids=[3, 1, 4, 1, 5], prompt_len=5, num_computed=0, sampling=GREEDY)]
    work = [RowWork(row=0, num_tokens=4, samples=False, new_block_ids=[7, 2])]
    assert executor.runner.launch(StepPlan(step_id=1, work=work, new_rows=bind)).result().rows == []
    again = [RowInit(row=1, token_ids=[3, 1, 4, 1, 9, 9], prompt_len=4, num_computed=4, sampling=GREEDY)]
    work = [RowWork(row=1, num_tokens=2, samples=True, new_block_ids=[7, 5])]
    result = executor.runner.launch(StepPlan(step_id=2, work=work, new_rows=again, freed_rows=[0])).result()
    assert result.rows[0].token_ids == expected([3, 1, 4, 1, 9, 9], 1)
    assert result.step_id == 2 and result.device_s > 0


def test_copy_on_write_happens_before_the_forward() -> None:
    """Two rows share a prompt's blocks; the second writes into a copy of the half-filled one."""
    executor = RunnerExecutor(4)
    prompt = [3, 1, 4, 1, 5, 9]
    bind = [RowInit(row=0, token_ids=prompt, prompt_len=6, num_computed=0, sampling=GREEDY)]
    work = [RowWork(row=0, num_tokens=6, samples=True, new_block_ids=[3, 1])]
    executor.runner.launch(StepPlan(step_id=1, work=work, new_rows=bind)).result()
    fork = [RowInit(row=1, token_ids=[*prompt, 50], prompt_len=6, num_computed=6, sampling=GREEDY)]
    work = [
        RowWork(row=0, num_tokens=1, samples=True),
        RowWork(row=1, num_tokens=1, samples=True, new_block_ids=[3, 1], replaced_blocks=[(1, 8)]),
    ]
    result = executor.runner.launch(StepPlan(step_id=2, work=work, new_rows=fork, block_copies=[(1, 8)])).result()
    assert [r.token_ids for r in result.rows] == [expected(prompt, 2)[1:], expected([*prompt, 50], 1)]


@pytest.mark.parametrize("case", ["not finite", "foreign token"])
def test_a_row_at_fault_fails_alone_and_plans_already_made_still_run(case: str) -> None:
    executor = RunnerExecutor(4)
    executor.decoder.poison = 77 if case == "not finite" else None
    bad = [77, 1] if case == "not finite" else [VOCAB, 1]
    jobs = [Job([1, 2], 4), Job(bad, 4), Job([5], 4)]
    ExecutorDriver(executor, executor.ready, 4).generate(jobs, depth=3, ahead=True)
    assert jobs[0].token_ids == expected([1, 2], 4)
    assert jobs[2].token_ids == expected([5], 4)
    assert all(r.error is not None and not r.token_ids for r in jobs[1].results)
    assert (str(VOCAB) if case != "not finite" else "finite") in str(jobs[1].results[0].error)


def test_logprobs_ride_with_their_row() -> None:
    executor = RunnerExecutor(4)
    jobs = [Job([1], 2), Job([2], 2, RowSampling(temperature=0.0, logprobs=2))]
    ExecutorDriver(executor, executor.ready, 4).generate(jobs)
    assert all(r.logprobs is None for r in jobs[0].results)
    first = jobs[1].results[0].logprobs
    assert first is not None and first[0].token_id == jobs[1].token_ids[0] and len(first[0].top) == 2


def numbered_cache() -> KVCache:
    """Two layers, four blocks; each block holds 10 * tensor + block."""
    kv = KVCache.allocate([KVLayout.keys_and_values(1, 3)] * 2, 4, 2, torch.float32, CpuPlatform())
    assert not kv.slab.any()
    for place, tensor in enumerate(kv.slab):
        assert tensor.shape == (4, 2, 1, 3)
        tensor.copy_(torch.arange(4.0)[:, None, None, None] + 10 * place)
    return kv


def test_block_copies_read_before_they_write() -> None:
    kv = numbered_cache()
    kv.copy([(0, 1), (1, 2)])
    for place, tensor in enumerate(kv.slab):
        assert tensor[:, 1, 0, 2].tolist() == [10 * place + v for v in (0, 0, 1, 3)]


def test_cleared_blocks_are_zero_in_every_layer() -> None:
    kv = numbered_cache()
    kv.clear([1, 3])
    assert not kv.slab[:, [1, 3]].any()
    assert kv.slab[:, 2].ne(0).all()


@pytest.mark.parametrize(("num_computed", "fresh"), [(0, [7, 2, 5]), (3, [2, 5]), (4, [2, 5]), (5, [5]), (9, [])])
def test_only_blocks_without_computed_tokens_are_fresh(num_computed: int, fresh: list[int]) -> None:
    table = RowTable(1, 20, 4, VOCAB)
    bind = RowInit(row=0, token_ids=[1] * 12, prompt_len=12, num_computed=num_computed, sampling=GREEDY)
    work = RowWork(row=0, num_tokens=1, samples=False, new_block_ids=[7, 2, 5])
    assert table.apply(StepPlan(step_id=1, work=[work], new_rows=[bind])) == fresh
    work = RowWork(row=0, num_tokens=1, samples=False, new_block_ids=[6], replaced_blocks=[(1, 9)])
    assert table.apply(StepPlan(step_id=2, work=[work])) == [6]
