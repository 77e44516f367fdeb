"""An engine on every rank of a group, all of them in step: each hands its plans to its own rank, and the result that
one rank has is shared. So ranks as threads and as processes run whole histories, with memory that runs out on the way.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from tandem.parallel.context import ParallelContext
from tandem.workers.build import model_facts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.executor import ExecutorReady
from tandem.workers.kernels.sampling_ops import TorchSampling
from tandem.workers.messages.request import Ended, GenerationRequest, TokenDelta, TokenLogprobs, Usage
from tandem.workers.messages.step import StepPlan, StepResult
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform, HostAccelerator
from tandem.workers.rank.drafts import Drafts
from tandem.workers.rank.launched_steps import StepHandle
from tandem.workers.rank.loading import load_rank
from tandem.workers.rank.model_runner import ModelRunner
from tests.support.engine_invariants import check_invariants
from tests.support.platforms import GpuOnHost, replaced
from tests.support.recorded_graph import RecordedCollectives, recorded
from tests.support.slot_lora import SlotLora
from tests.support.traced_accelerator import TracedAccelerator, is_view

Share = Callable[[Any], list[Any]]
MOST_STEPS = 2000
GROUPS = [(1, 1), (2, 1), (1, 2), (2, 2)]
IN_CHUNKS = [
    pytest.param(tp, pp, late, marks=pytest.mark.parity if late and tp != pp else ())
    for tp, pp in GROUPS
    for late in (False, True)
]
"""TP and PP size, and whether the host learns a step's outcome late, as on a device, which takes several times as
long: make parity runs the sizes between one rank and both cuts at once."""


@dataclass(frozen=True)
class Fault:
    """No memory on a rank: at an operation of torch's in its step of this number, from 0; with prompt_len in every step
    that has a row with such a prompt.

    collectives: those of the step that are over by then; operations: how many follow before the one that fails. again:
    nor is there any for the rest of the step's exchanges. nan: none of this, but the KV of the row is not finite here.
    """

    rank: int
    step: int | None
    collectives: int = 0
    operations: int = 0
    prompt_len: int | None = None
    again: bool = False
    nan: bool = False

    def rows(self, plan: StepPlan, runner: ModelRunner) -> list[int]:
        """The rows with such a prompt, once they have computed tokens."""
        table = runner._table
        return [w.row for w in plan.work if table.prompt_len[w.row] == self.prompt_len and table.num_computed[w.row]]

    def strikes(self, step: int, plan: StepPlan, runner: ModelRunner) -> bool:
        lens = [
            int(runner._table.prompt_len[work.row]) for work in plan.work if work.row < len(runner._table.prompt_len)
        ]
        lens += [init.prompt_len for init in plan.new_rows]
        return step == self.step if self.prompt_len is None else self.prompt_len in lens


@dataclass(frozen=True)
class EngineCase:
    """One history. drafts: of a row in a step, at most, by `method`, for which there may be a `draft`. is_hybrid:
    layers with windows give blocks back. late: a step's outcome is on the device until somebody waits for it, as on a
    GPU; prompt_ranks: those that learn it at once all the same. replays: captures are made at the start, by the
    recorded-graph twin, as on a GPU; draws: with draws of tokens where late too, which takes longer."""

    folder: Path
    tp_size: int
    pp_size: int
    requests: tuple[GenerationRequest, ...]
    faults: tuple[Fault, ...] = ()
    late: bool = False
    num_blocks: int = 64
    max_num_batched_tokens: int = 16
    most_rows: int = 4
    drafts: int = 0
    method: str = "ngram"
    draft: Path | None = None
    is_hybrid: bool = True
    replays: bool = False
    prompt_ranks: tuple[int, ...] = ()
    draws: bool = False
    max_model_len: int | None = None

    def settings(self) -> EngineSettings:
        draft = None if self.draft is None or not self.drafts else ModelSettings(model=str(self.draft), dtype="float32")
        is_eager = self.late and not self.replays
        lookup = {"prompt_lookup_max": 2, "prompt_lookup_min": 1} if self.method == "ngram" else {}
        return EngineSettings(
            model=ModelSettings(
                model=str(self.folder),
                dtype="float32",
                enforce_eager=is_eager,
                draft=draft,
                max_model_len=self.max_model_len,
            ),
            parallel=ParallelSettings(tensor_parallel_size=self.tp_size, pipeline_parallel_size=self.pp_size),
            cache=CacheSettings(
                block_size=4, num_blocks=self.num_blocks, disable_hybrid_kv_cache_manager=not self.is_hybrid
            ),
            scheduler=SchedulerSettings(
                max_num_seqs=self.most_rows, max_num_batched_tokens=self.max_num_batched_tokens
            ),
            device=DeviceSettings(device="cpu"),
            speculative=SpeculativeSettings(method=self.method, num_speculative_tokens=self.drafts, **lookup)
            if self.drafts
            else None,
        )


@dataclass
class Told:
    """What the engine said: every choice's tokens or embedding, the ends of requests, and the steps that failed.
    num_alone: of these the ones with one token, whose request ends. num_struck: faults that found an operation to fail
    at."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    usages: dict[str, Usage] = field(default_factory=dict)
    reasons: dict[str, list[str | None]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_alone: int = 0
    num_struck: int = 0
    num_preempted: int = 0
    num_replays: int = 0

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            tokens = self.tokens.setdefault((delta.request_id, delta.choice), [])
            assert delta.first_position == len(tokens), "a gap or a repeat"
            tokens += delta.token_ids
            if delta.embedding is not None:
                assert delta.request_id not in self.embeddings and delta.finish_reason == "stop"
                self.embeddings[delta.request_id] = delta.embedding
            if delta.prompt_logprobs is not None:
                assert not tokens and delta.finish_reason is None
                entries = self.prompt_logprobs.setdefault(delta.request_id, [])
                assert delta.prompt_logprobs.first_position == len(entries) + 1, "a gap or a repeat"
                entries += delta.prompt_logprobs.entries
            self.errors += [] if delta.error is None else [delta.error]

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        self.reasons[request.request_id] = list(ended.finish_reasons)
        self.usages[request.request_id] = ended.usage


class RunsOut(TorchDispatchMode):
    """Lets one operation fail that may need memory: the one after so many of those for which `counts` is true."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and the guard against that costs more than most operations

    def __init__(self, operations: int, counts: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._left = operations
        self._counts = counts
        self.has_struck = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.has_struck and not is_view(func) and self._counts():
            self._left -= 1
            if self._left < 0:
                self.has_struck = True
                raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")
        return func(*args, **kwargs or {})


class FaultyRank:
    """The Executor of one rank's engine, whose runner has faults."""

    def __init__(self, runner: ModelRunner, faults: list[Fault], share: Share, told: Told) -> None:
        self._runner = runner
        self._faults = faults
        self._share = share
        self._told = told
        self._handles: deque[Any] = deque()
        self._num_steps = 0
        self._compute = runner._compute
        self._make_up = runner._exchanges.make_up
        steps = runner._steps
        self._settle, self._is_settling = steps.settle, False
        steps.settle = self._note_settling  # type: ignore[method-assign]

    def submit(self, plan: StepPlan) -> None:
        for fault in self._faults:
            if fault.nan and (rows := fault.rows(plan, self._runner)):
                self._runner.kv.slab[:, int(self._runner._table.block_ids[rows[0], 0])] = float("nan")
                self._told.num_struck += 1
        ill = [fault for fault in self._faults if not fault.nan]
        faults = [fault for fault in ill if fault.strikes(self._num_steps, plan, self._runner)]
        self._num_steps += 1
        runner: Any = self._runner
        runner._compute = partial(self._fail, faults[0]) if faults else self._compute
        runner._exchanges.make_up = self._fail_again if faults and faults[0].again else self._make_up
        self._handles.append((runner.launch(plan), sum(work.num_tokens + work.max_drafts for work in plan.work)))

    def _fail(self, fault: Fault, plan: StepPlan, drafts: Drafts | None) -> Any:
        tp = self._runner._context.tp
        # a replay has its memory
        with RunsOut(
            fault.operations,
            lambda: tp._num_done >= fault.collectives and not tp._is_inside and not self._is_settling,
        ) as mode:
            try:
                return self._compute(plan, drafts)
            finally:
                self._told.num_struck += mode.has_struck

    def _note_settling(self, last: StepHandle) -> None:
        """A step before is read, in host memory: nothing for the device to run out in."""
        before, self._is_settling = self._is_settling, True
        self._settle(last)
        self._is_settling = before

    def _fail_again(self) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")

    def poll(self, timeout_s: float) -> StepResult | None:
        if not self._handles:
            return None
        handle, num_tokens = self._handles.popleft()
        (result,) = (result for result in self._share(handle.result()) if result is not None)
        if result.failure is not None:
            self._told.failures.append(result.failure)
            self._told.num_alone += num_tokens == 1
        return result

    def count_experts(self) -> None:
        """Nobody reads the loads here."""

    def start(self) -> ExecutorReady:
        raise NotImplementedError

    def transfer(self, op: Any) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


def run_engine(case: EngineCase, context: ParallelContext, share: Share | None = None) -> Told:
    """Serves the case's requests on this rank. share: None in a process of its own."""
    share = share or partial(_share_between_processes, context.world_size)
    accelerator = TracedAccelerator() if case.late and context.rank not in case.prompt_ranks else None
    platform: Platform = CpuPlatform()
    if accelerator is not None or case.replays:
        on_host = GpuOnHost(accelerator or HostAccelerator(), recorded if case.replays else None)
        platform = replaced(on_host, memory=lambda: None, lora_ops=lambda dtype: SlotLora())
        if (
            accelerator is not None and not case.draws
        ):  # each operation of a capture is traced: without those that draw tokens
            platform = replaced(platform, sampling_ops=TorchSampling)
        context.tp.group = RecordedCollectives(context.tp.group, context.tp_size)
    if accelerator is None:
        return _serve(case, context, platform, share)
    with accelerator.tracing():
        return _serve(case, context, platform, share)


def _serve(case: EngineCase, context: ParallelContext, platform: Platform, share: Share) -> Told:
    settings, told = case.settings(), Told()
    loaded = load_rank(settings, context, platform, rank=context.rank, ranks_on_node=context.world_size)
    runner = loaded.build_runner(case.num_blocks)
    rank = FaultyRank(runner, [fault for fault in case.faults if fault.rank == context.rank], share, told)
    ready = ExecutorReady(
        num_blocks=case.num_blocks,
        pipeline_parallel_size=case.pp_size,
        device="cpu",
        dtype="float32",
        threads=1,
        weight_bytes=0,
        block_bytes=0,
        load_s=0.0,
    )
    engine = build_engine(settings, model_facts(settings, ready), rank, ready, told)
    for request in case.requests:
        engine.add_request(request)
    for _ in range(MOST_STEPS):
        if not engine.has_work():
            break
        engine.turn(0.0)
        check_invariants(engine)
    assert not engine.has_work(), "it is stuck"
    assert engine.stats().used_blocks == 0
    told.num_preempted, told.num_replays = engine.stats().preemptions, loaded.decoder.graphs.num_replays
    runner.close()
    return told


def _share_between_processes(count: int, what: Any) -> list[Any]:
    everybodys: list[Any] = [None] * count
    if count == 1:
        return [what]
    dist.all_gather_object(everybodys, what)
    return everybodys
