"""A course of plans on ranks that capture and replay steps as GPUs do, over the host's memory: prompts, then decodes,
with adapters, drafts and a grammar. Each rank runs it by itself: it needs the results of no other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tandem.configs.schema import (
    CacheSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.workers.graphs.cuda_graphs import CaptureGraph, Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.messages.handshake import CaptureReport
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.rank.loading import load_rank
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.text.grammars import regex
from tests.support.engine_ranks import RunsOut
from tests.support.lora_ranks import put_all
from tests.support.platforms import GpuOnHost, replaced
from tests.support.recorded_graph import RecordedCollectives, recorded
from tests.support.slot_lora import SlotLora

BLOCK, BLOCKS = 16, 6
CAPTURED = RowSampling(temperature=0.7, top_k=5, seed=4, frequency_penalty=0.1)
SHARDED = (
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.8, seed=3),
    RowSampling(temperature=1.1, min_p=0.02, seed=9, choice=1),
)
BEHIND = RowSampling(temperature=0.7, top_k=5, seed=4, frequency_penalty=0.1, bad_words_token_ids=((5, 6),))
PROMPTS = [[5, 6, 7, 8] * 5, [9, 30, 9, 30, 9], [110] * 7]


@dataclass(frozen=True)
class CourseCase:
    """One course. kind: steps are replayed, or run again eagerly at the same padding. fails: the rank that cannot
    capture steps of `fails_at` tokens and more; fails_early: nor run them eagerly; refuses:
    the rank that replays nothing, as one with streamed layers. budget: tokens of a step; of more than 16, steps with
    chunks are captured too. plain: captures draw the tokens; shards: from parts of the vocabulary."""

    folder: Path
    tp_size: int
    adapters: tuple[Path, ...] = ()
    drafts: int = 0
    grammar: bool = False
    steps: int = 12
    kind: Literal["replayed", "padded"] = "replayed"
    fails: int | None = None
    fails_at: int = 4
    fails_early: bool = False
    refuses: int | None = None
    budget: int = 16
    plain: bool = False
    shards: bool = False


@dataclass
class Ran:
    """Tokens by row, and the steps that were said to be replayed, on the rank that samples; logits of each step.
    num_drawn_behind: replayed steps whose tokens no capture has drawn; num_by_shards: those that ranks draw by
    shards."""

    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in PROMPTS])
    logits: list[torch.Tensor] = field(default_factory=list)
    num_replays: int = 0
    num_said_replayed: int = 0
    num_drawn_behind: int = 0
    num_by_shards: int = 0
    num_captured: int = 0
    num_captured_late: int = 0
    report: CaptureReport | None = None


def eagerly(tp: StepCollectives) -> CaptureGraph:
    """No capture: each replay runs the body again, on the inputs of now."""

    def capture(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        outputs = body()

        def replay() -> None:
            before = tp._num_done
            for mine, its in zip(outputs, body(), strict=True):
                mine.copy_(its)
            tp._num_done = before

        return replay, outputs

    return capture


def run_course(case: CourseCase, context: ParallelContext, share: object = None) -> Ran:
    """Runs the course on this rank."""
    ran = Ran()
    context.tp.group = RecordedCollectives(context.tp.group, context.tp_size)
    platform = _platform(case, context, ran)
    loaded = load_rank(_settings(case), context, platform, rank=context.rank, ranks_on_node=context.world_size)
    loaded.decoder.graphs.can_replay &= case.refuses != context.rank
    if case.fails_early and case.fails == context.rank:
        _starve(case, loaded.decoder.graphs, context)
    runner = loaded.build_runner(BLOCKS * len(PROMPTS))
    ran.report, at_start = runner.captures, ran.num_captured
    if loaded.adapters is not None:
        put_all(loaded.adapters, list(case.adapters))
    if loaded.grammars is not None and case.grammar:
        loaded.grammars.compile("form", regex("[a-z ,.]*"))
    forward = runner._forward
    runner._forward = lambda *step: _noted(ran, runner, forward(*step))  # type: ignore[method-assign]
    draw = runner._draw
    runner._draw = lambda *step: _drawn(ran, runner, draw(*step))  # type: ignore[method-assign]
    _run(case, runner, ran)
    ran.num_captured_late = ran.num_captured - at_start
    ran.num_replays = loaded.decoder.graphs.num_replays
    runner.close()
    return ran


def _noted(ran: Ran, runner: ModelRunner, found: Any) -> Any:
    ran.logits.append(found[0].clone())
    step = runner._replays.step
    ran.num_by_shards += step is not None and step.by_shards
    return found


def _drawn(ran: Ran, runner: ModelRunner, found: Any) -> Any:
    ran.num_drawn_behind += runner._replays.now is not None
    return found


def _starve(case: CourseCase, graphs: Any, context: ParallelContext) -> None:
    """Lets the memory of a capture's eager run end in the middle of its layers."""
    capture, tp = graphs.capture, context.tp

    def starved(key: Any, step: Any) -> Any:
        body = step.run

        def run() -> Outputs:
            with RunsOut(60, lambda: not tp._is_inside):
                return body()

        step.run = run if step.num_tokens >= case.fails_at else body
        return capture(key, step)

    graphs.capture = starved


def _platform(case: CourseCase, context: ParallelContext, ran: Ran) -> Platform:
    chosen = recorded if case.kind == "replayed" else eagerly(context.tp)

    def capture(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        ran.num_captured += 1
        replay, outputs = chosen(body)
        is_step = len(outputs) > 1
        if not case.fails_early and case.fails == context.rank and is_step and len(outputs[0]) >= case.fails_at:
            raise torch.OutOfMemoryError("no memory for a graph")
        return replay, outputs

    platform = GpuOnHost(HostAccelerator(), capture)
    return replaced(platform, memory=lambda: None, lora_ops=lambda dtype: SlotLora())


def _settings(case: CourseCase) -> EngineSettings:
    speculative = SpeculativeSettings(
        method="ngram", num_speculative_tokens=case.drafts or 1, prompt_lookup_max=2, prompt_lookup_min=1
    )
    return EngineSettings(
        model=ModelSettings(model=str(case.folder), dtype="float32", max_model_len=BLOCK * BLOCKS),
        parallel=ParallelSettings(tensor_parallel_size=case.tp_size),
        cache=CacheSettings(block_size=BLOCK, num_blocks=BLOCKS * len(PROMPTS)),
        scheduler=SchedulerSettings(max_num_seqs=len(PROMPTS), max_num_batched_tokens=case.budget),
        lora=LoraSettings(enable_lora=bool(case.adapters), max_loras=2, max_lora_rank=8),
        speculative=speculative if case.drafts else None,
    )


def _run(case: CourseCase, runner: ModelRunner, ran: Ran) -> None:
    samplings = [
        RowSampling(temperature=0.0),
        CAPTURED if case.plain else BEHIND,
        RowSampling(temperature=0.0, grammar="form" if case.grammar else None),
    ]
    samplings = list(SHARDED) if case.shards else samplings
    slots = [0, None, 1] if case.adapters else [None] * len(PROMPTS)
    plans, count = [], len(PROMPTS)
    inits = [
        RowInit(row=row, token_ids=prompt, prompt_len=len(prompt), num_computed=0, sampling=own, adapter_slot=slot)
        for row, (prompt, own, slot) in enumerate(zip(PROMPTS, samplings, slots, strict=True))
    ]
    for row, init in enumerate(inits):
        blocks = list(range(row, BLOCKS * count, count))
        work = RowWork(row=row, num_tokens=len(init.token_ids), samples=True, new_block_ids=blocks)
        plans.append(StepPlan(step_id=1 + row, work=[work], new_rows=[init]))
    for step in range(case.steps):
        rows = range(count) if step % 3 else range(1 + step % 2)
        decodes = [RowWork(row=row, num_tokens=1, samples=True, max_drafts=case.drafts) for row in rows]
        plans.append(StepPlan(step_id=1 + count + step, work=decodes))
    for plan in plans:
        result = runner.launch(plan).result()
        for row in [] if result is None else result.rows:
            assert row.error is None, row.error
            ran.tokens[row.row] += row.token_ids
        if result is not None:
            ran.num_said_replayed += result.is_replayed


def run_awaited(case: CourseCase, context: ParallelContext, share: object = None) -> tuple[list[bool], set[int]]:
    """A decode step that awaits a load, for which rank 1 has no memory, and the same step again, which awaits nothing.
    Returns which of the three steps were replayed here, and the tickets that were waited for at once."""
    context.tp.group = RecordedCollectives(context.tp.group, context.tp_size)
    platform = _platform(case, context, Ran())
    loaded = load_rank(_settings(case), context, platform, rank=context.rank, ranks_on_node=context.world_size)
    runner, waited = loaded.build_runner(BLOCKS), set()

    class Gate:
        def in_turn(self, layers: Any, tickets: Any, page_of: Any) -> Any:
            return iter(layers)

        def wait(self, ticket: int, page: int) -> None:
            waited.add(ticket)

    def runs_out(*_: object) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB")

    runner.gate = Gate()  # type: ignore[assignment]
    greedy, prompt = RowSampling(temperature=0.0), PROMPTS[1]
    init = RowInit(row=0, token_ids=prompt, prompt_len=len(prompt), num_computed=0, sampling=greedy)
    first = RowWork(row=0, num_tokens=len(prompt), samples=True, new_block_ids=[0])
    again, held = RowWork(row=0, num_tokens=1, samples=True), (0, len(prompt) + 1, len(prompt))
    plans = [
        StepPlan(step_id=1, work=[first], new_rows=[init]),
        StepPlan(step_id=2, work=[again], awaits=[4]),
        StepPlan(step_id=3, work=[again], rolled_back=[held], known_failure=2),
    ]
    replayed = []
    for plan in plans:
        before = loaded.decoder.graphs.num_replays
        if plan.awaits and context.rank == 1:
            runner._compute = runs_out  # type: ignore[method-assign]
        handle = runner.launch(plan)
        vars(runner).pop("_compute", None)
        handle.result()
        assert (handle.failure is None) == (plan.step_id != 2), handle.failure
        replayed.append(loaded.decoder.graphs.num_replays > before)
    runner.close()
    return replayed, waited
