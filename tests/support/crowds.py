"""Crowds: rows that come, are computed in chunks, decode with drafts and go, in steps of any mix, on a rank whose
platform is a GPU's over the host's memory. Every step is launched before the host has read the one ahead.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.configs.schema import (
    CacheSettings,
    EngineSettings,
    LoraSettings,
    ModelSettings,
    SchedulerSettings,
    SpeculativeSettings,
)
from tandem.parallel.context import ParallelContext
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.lora.device.rank_adapters import open_adapters
from tandem.workers.messages.handshake import CaptureReport
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.launched_steps import StepHandle
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.start.captures import sizes_of
from tandem.workers.speculation.proposers import make_guess, make_proposer
from tests.support.lora_ranks import put_all
from tests.support.platforms import GpuOnHost, NoGraphs, replaced
from tests.support.slot_lora import SlotLora
from tests.support.traced_accelerator import POISON

ROWS, MAX_LEN, BLOCK, BUDGET = 4, 96, 16, 64
BLOCKS = -(-(MAX_LEN + 64) // BLOCK)
"""Of each row, in each group of layers."""
Capture = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]
GREEDY = RowSampling(temperature=0.0)
PLAIN = (GREEDY, RowSampling(temperature=0.8, seed=3), RowSampling(temperature=1.1, min_p=0.02, seed=9, choice=1))
"""What a capture draws."""


def eagerly(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
    """No capture: each replay runs the body again, on the inputs of now."""
    outputs = body()

    def replay() -> None:
        for mine, its in zip(outputs, body(), strict=True):
            mine.copy_(its)

    return replay, outputs


class LateEvent:
    """An event that is done when somebody has waited for it, and with it what was copied to the host before."""

    def __init__(self, arrivals: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._arrivals = list(arrivals)
        self._is_done = False

    def is_done(self) -> bool:
        return self._is_done

    @torch.inference_mode()
    def wait(self) -> None:
        for host, content in self._arrivals:
            host.copy_(content)
        self._is_done = True

    def seconds_since(self, earlier: Any) -> float:
        return 0.0


class LateAccelerator(HostAccelerator):
    """Host memory that is read late, as a device's: until then a reader finds something else."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(tensor, POISON)
        self._arrivals.append((host, tensor.clone()))
        return host

    def event(self, *, timed: bool = False) -> Any:
        event, self._arrivals = LateEvent(self._arrivals), self._arrivals[-8:]
        return event


def device(capture: Capture | None, accelerator: HostAccelerator | None = None) -> Platform:
    """A GPU's platform on CPU memory."""
    platform = GpuOnHost(accelerator or LateAccelerator(), capture or eagerly)
    return replaced(platform, lora_ops=lambda dtype: SlotLora())


def settings_of(
    rows: int = ROWS, *, max_loras: int = 0, block_size: int = BLOCK, drafts: int = 0, budget: int = BUDGET
) -> EngineSettings:
    speculative = SpeculativeSettings(
        method="ngram", num_speculative_tokens=drafts or 1, prompt_lookup_max=2, prompt_lookup_min=1
    )
    return EngineSettings(
        model=ModelSettings(model="tiny", dtype="float32"),
        cache=CacheSettings(block_size=block_size),
        scheduler=SchedulerSettings(max_num_seqs=rows, max_num_batched_tokens=budget),
        lora=LoraSettings(enable_lora=max_loras > 0, max_loras=max(1, max_loras), max_lora_rank=8),
        speculative=speculative if drafts else None,
    )


def decoder_on(
    platform: Platform,
    folder: Path,
    adapters: Sequence[Path] = (),
    kv_dtype: torch.dtype | None = None,
    windows: tuple[int | None, ...] = (None,),
) -> Decoder:
    spec = load_spec(folder)
    context = ParallelContext.single()
    decoder = build_decoder(
        spec, context, folder=folder, dtype=torch.float32, platform=platform, kv_dtype=kv_dtype, windows=windows
    )
    if adapters:
        settings = LoraSettings(enable_lora=True, max_loras=2, max_lora_rank=8)
        opened = open_adapters(
            settings, spec, folder, decoder, platform, torch.float32, available_bytes=None, pp_size=1
        )
        put_all(opened, list(adapters))
    return decoder


@dataclass
class Rank:
    """A runner of a group of one with its captures. tokens: by row and life; logits: of each step; num_ahead: of steps
    that were launched before the one ahead was read."""

    runner: ModelRunner
    decoder: Decoder
    report: CaptureReport | None
    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    num_replays: list[bool] = field(default_factory=list)
    num_accepted: int = 0
    num_ahead: int = 0
    lives: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        platform: Platform,
        settings: EngineSettings,
        capture: Capture | None,
        *,
        vocab_size: int,
        kv_dtype: torch.dtype | None = None,
        windows: tuple[int | None, ...] = (None,),
        max_len: int = MAX_LEN,
    ) -> "Rank":
        rows, size = settings.scheduler.max_num_seqs, settings.cache.block_size
        blocks = -(-(max_len + 64) // size) * rows * len(windows)
        kv = KVCache.allocate(decoder.kv_layouts, blocks, size, kv_dtype or torch.float32, platform)
        table = RowTable(rows, max_len, size, vocab_size, windows=windows)
        guess, proposer = make_guess(settings.speculative), make_proposer(settings.speculative)
        if capture is None:
            decoder.graphs = NoGraphs()
        make = None if proposer is None else lambda _: proposer
        runner = ModelRunner(decoder, ParallelContext.single(), kv, table, platform, None, make, guess)
        runner.make_captures(sizes_of(decoder, kv.tensors, settings, max_len), settings.max_drafts)
        rank = cls(runner, decoder, runner.captures)
        forward = runner._forward
        runner._forward = lambda *step: rank._noted(forward(*step))  # type: ignore[method-assign]
        return rank

    def run(self, plans: Sequence[StepPlan]) -> None:
        """Launches each plan before the one ahead is read."""
        last: tuple[StepHandle, dict[int, int]] | None = None
        for plan in plans:
            for init in plan.new_rows:
                self.lives[init.row] = self.lives.get(init.row, -1) + 1
            step = self.runner.launch(plan)
            if last is not None:
                self.num_ahead += not last[0].settled
                self._take(*last)
            last = step, dict(self.lives)
        if last is not None:
            self._take(*last)

    def _take(self, step: StepHandle, lives: dict[int, int]) -> None:
        result = step.result()
        assert result is not None and result.failure is None
        self.num_replays.append(result.is_replayed)
        for row in result.rows:
            assert row.error is None, row.error
            self.tokens.setdefault((row.row, lives[row.row]), []).extend(row.token_ids)
            self.num_accepted += max(0, len(row.token_ids) - 1)
            self.logprobs += row.logprobs or []

    def _noted(self, found: Any) -> Any:
        self.logits.append(found[0].clone())
        return found


def crowd(
    seed: int,
    steps: int,
    *,
    samplings: Sequence[RowSampling] = PLAIN,
    adapters: int = 0,
    drafts: int = 0,
    groups: int = 1,
    rows: int = ROWS,
) -> list[StepPlan]:
    """Plans of steps of any mix. A row that has decoded for a while gives way to another."""
    rng, plans = random.Random(seed), []
    left: dict[int, int] = {}  # tokens of its prompt
    decoded: dict[int, int] = {}
    held: set[int] = set()
    total = BLOCKS * rows * groups
    blocks = np.arange(total).reshape(BLOCKS, rows, groups).transpose(1, 0, 2).reshape(rows, -1).tolist()
    for step in range(steps):
        new, work, budget = [], [], BUDGET
        for row in rng.sample(range(rows), rng.choice((1, rows - 1, rows, rows))):
            if row not in left or decoded[row] > 8:
                prompt = [rng.randrange(3, 9) if rng.random() < 0.5 else 3 + k % 4 for k in range(rng.randrange(1, 50))]
                left[row], decoded[row] = len(prompt), 0
                slot = rng.choice((None, *range(adapters))) if adapters else None
                sampling = samplings[(step + row) % len(samplings)]
                new.append(
                    RowInit(
                        row=row,
                        token_ids=prompt,
                        prompt_len=len(prompt),
                        num_computed=0,
                        sampling=sampling,
                        adapter_slot=slot,
                    )
                )
                held.discard(row)
            if not budget:
                continue
            own = [] if row in held else blocks[row]
            held.add(row)
            if left[row]:
                count = min(left[row], rng.choice((1, 5, 20, 50)), budget)
                left[row] -= count
                work.append(RowWork(row=row, num_tokens=count, samples=not left[row], new_block_ids=own))
            else:
                count = 1 + min(drafts, budget - 1)
                decoded[row] += 1
                work.append(RowWork(row=row, num_tokens=1, samples=True, max_drafts=count - 1))
            budget -= count
        plans.append(StepPlan(step_id=1 + step, work=work, new_rows=new))
    return plans
