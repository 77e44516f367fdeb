"""A tiny hand scheduler over any Executor: fixed chunks, no preemption, no sharing. For tests of ranks and executors.

Every row gets all its blocks with its first work. With PP > 1 sampled tokens go back in their row's next work; with
PP = 1 rows may be planned ahead of their results (`ahead`), as the engine's async scheduling does.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.messages.step import RowInit, RowResult, RowSampling, RowWork, StepPlan, StepResult
from tandem.workers.messages.transfer import TransferResult

WAIT_S = 60.0


@dataclass
class Job:
    """One sequence to generate. `results` gets every RowResult in order."""

    prompt: list[int]
    max_tokens: int
    sampling: RowSampling = field(default_factory=lambda: RowSampling(temperature=0.0))
    results: list[RowResult] = field(default_factory=list)
    num_computed: int = 0
    num_sampled: int = 0
    unsent: list[int] = field(default_factory=list)
    bound: bool = False
    adapter_slot: int | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token for result in self.results for token in result.token_ids]

    @property
    def num_known(self) -> int:
        return len(self.prompt) + self.num_sampled

    @property
    def planned(self) -> bool:
        return self.num_sampled == self.max_tokens

    def work(self, row: int, chunk: int, blocks: list[int]) -> RowWork:
        """The row's next work: at most `chunk` tokens of the prompt, or one token."""
        num_tokens = min(chunk, self.num_known - self.num_computed)
        self.num_computed += num_tokens
        samples = self.num_computed == self.num_known
        self.num_sampled += samples
        new_block_ids, token_ids = ([] if self.bound else blocks), self.unsent
        self.bound, self.unsent = True, []
        return RowWork(
            row=row, num_tokens=num_tokens, samples=samples, new_block_ids=new_block_ids, token_ids=token_ids
        )


def plan_of_one_row() -> StepPlan:
    """A step of one new row, with a number that no driver comes to."""
    init = RowInit(row=0, token_ids=[1, 2], prompt_len=2, num_computed=0, sampling=RowSampling(temperature=0.0))
    work = RowWork(row=0, num_tokens=2, samples=True, new_block_ids=[0])
    return StepPlan(step_id=10**6, work=[work], new_rows=[init])


class ExecutorDriver:
    """Runs jobs on a started executor; each call uses rows 0.. and takes blocks from the end of the pool."""

    def __init__(self, executor: Executor, ready: ExecutorReady, block_size: int) -> None:
        self._executor = executor
        self._ready = ready
        self._block_size = block_size
        self._step_id = 0
        self.transferred: list[TransferResult] = []

    def generate(self, jobs: list[Job], *, chunk: int = 5, depth: int = 1, ahead: bool = False) -> list[list[int]]:
        """Token ids of all jobs. depth: plans in flight; each serves the rows that are not waiting for a sample."""
        relay = self._ready.pipeline_parallel_size > 1
        in_flight: deque[dict[int, Job]] = deque()
        blocks = self._assign(jobs)
        while True:
            waiting = {id(job) for sampled in in_flight for job in sampled.values()}
            while len(in_flight) < depth:
                rows = [
                    (row, job)
                    for row, job in enumerate(jobs)
                    if not job.planned and (id(job) not in waiting or (ahead and not relay))
                ]
                rows = rows[: -(-len(jobs) // depth)] if relay else rows
                if not rows:
                    break
                sampled = self._submit(rows, blocks, chunk)
                waiting |= {id(job) for job in sampled.values()}
                in_flight.append(sampled)
            if not in_flight:
                self._submit_freed(len(jobs))
                return [job.token_ids for job in jobs]
            self._apply(self._next_result(), in_flight.popleft(), relay)

    def _assign(self, jobs: list[Job]) -> list[list[int]]:
        """Block ids for the whole life of every job, interleaved so that a row's blocks are not neighbours."""
        free: Iterator[int] = iter(range(self._ready.num_blocks - 1, -1, -1))
        blocks: list[list[int]] = [[] for _ in jobs]
        needs = [-(-(len(job.prompt) + job.max_tokens) // self._block_size) for job in jobs]
        for place in range(max(needs)):
            for owner, need in zip(blocks, needs, strict=True):
                if place < need:
                    owner.append(next(free))
        return blocks

    def _submit(self, rows: list[tuple[int, Job]], blocks: list[list[int]], chunk: int) -> dict[int, Job]:
        """One plan for `rows`; returns the jobs it samples for, by row."""
        inits = [
            RowInit(
                row=row,
                token_ids=list(job.prompt),
                prompt_len=len(job.prompt),
                num_computed=0,
                sampling=job.sampling,
                adapter_slot=job.adapter_slot,
            )
            for row, job in rows
            if not job.bound
        ]
        work = [job.work(row, chunk, blocks[row]) for row, job in rows]
        self._step_id += 1
        self._executor.submit(StepPlan(step_id=self._step_id, work=work, new_rows=inits))
        return {w.row: job for w, (_, job) in zip(work, rows, strict=True) if w.samples}

    def _submit_freed(self, num_rows: int) -> None:
        self._step_id += 1
        self._executor.submit(StepPlan(step_id=self._step_id, work=[], freed_rows=list(range(num_rows))))
        assert self._next_result().rows == []

    def _next_result(self) -> StepResult:
        """Answers to transfers are kept in `transferred`."""
        while isinstance(message := self._executor.poll(WAIT_S), TransferResult):
            self.transferred.append(message)
        assert message is not None, f"no result in {WAIT_S} s"
        return message

    @staticmethod
    def _apply(result: StepResult, sampled: dict[int, Job], relay: bool) -> None:
        assert [row.row for row in result.rows] == list(sampled)
        for row in result.rows:
            job = sampled[row.row]
            job.results.append(row)
            if relay:
                job.unsent = list(row.token_ids)
