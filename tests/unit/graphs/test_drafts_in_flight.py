"""Replayed graphs of steps with drafts in flight: the device guesses, and each step is launched before the host has
read the one ahead of it. Replays equal the same steps run eagerly, bit for bit, with adapters and logits processors."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.configs.schema import SpeculativeSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.attention.backend import KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import NoGraphs, Outputs
from tandem.workers.messages.step import RowInit, RowResult, RowSampling, RowWork, StepPlan
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import HostAccelerator
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.model_runner import ModelRunner, StepHandle
from tandem.workers.rank.row_table import RowTable
from tandem.workers.speculation.proposer import make_guess, make_proposer
from tests.support.adapters import save_random_adapter
from tests.support.platforms import GpuOnHost, replaced
from tests.support.recorded_graph import recorded
from tests.support.slot_lora import SlotLora
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tests.support.traced_accelerator import POISON
from tests.unit.graphs.test_cuda_graphs import captured, decoder_on, eagerly, settings_of

CPU, BLOCK, BLOCKS, STEPS, DRAFTS = torch.device("cpu"), 32, 4, 18, 3
PROMPTS = [[5, 6, 7, 8] * 3, [9, 3, 9, 3, 9], [11] * 7]
SLOTS = [0, None, 1]
SPECULATIVE = SpeculativeSettings(
    method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=2, prompt_lookup_min=1
)
SAMPLINGS = [
    RowSampling(temperature=0.0),
    RowSampling(temperature=0.5, top_k=2, seed=5, frequency_penalty=-0.1, bad_words_token_ids=((9, 9), (12,))),
    RowSampling(
        temperature=0.0,
        repetition_penalty=0.9,
        min_tokens=9,
        stop_token_ids=(11, 12),
        thinking_budget=ThinkingBudget(tokens=3, start=(11,), end=(5, 6), inside=True),
    ),
]
Capture = Callable[[Callable[[], Outputs]], tuple[Replay, Outputs]]


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
        return LateEvent(self._arrivals)


class Watched:
    """A decoder, and the logits of its steps as it gave them."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.logits: list[torch.Tensor] = []

    def forward(self, batch: ForwardBatch, kv: KVTensors, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        logits_SV = self._decoder.forward(batch, kv, hidden_TH)
        self.logits.append(logits_SV.clone())
        return logits_SV

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


class Course:
    """Prompts, then decode steps of all rows, each launched while the one ahead is unread. drafts: of a row."""

    def __init__(self, folder: Path, adapters: list[Path], capture: Capture | None, drafts: int) -> None:
        platform: Platform = GpuOnHost(LateAccelerator(), capture or recorded)
        platform = replaced(platform, lora_ops=lambda dtype: SlotLora())
        decoder = decoder_on(platform, folder, adapters)
        if capture is None:
            decoder.graphs = NoGraphs()
        self.kv = KVCache.allocate(decoder.kv_layouts, BLOCKS * len(PROMPTS), BLOCK, torch.float32, platform)
        table = RowTable(len(PROMPTS), BLOCK * BLOCKS, BLOCK, load_spec(folder).vocab_size)
        self.model, guess, proposer = Watched(decoder), make_guess(SPECULATIVE), make_proposer(SPECULATIVE)
        context = ParallelContext.single()
        runner = ModelRunner(self.model, context, self.kv, table, platform, None, proposer, guess)
        self.num_ahead, self.num_accepted = 0, 0
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        if capture is not None:
            rows = len(PROMPTS) * (1 + drafts)
            settings = settings_of(rows, max_loras=len(adapters), block_size=BLOCK)
            captured(decoder, self.kv.tensors, platform, settings, BLOCK * BLOCKS)
        self._run(runner, bool(adapters), drafts)
        self.num_replays = decoder.graphs.num_replays

    def _run(self, runner: ModelRunner, adapted: bool, drafts: int) -> None:
        inits = [
            RowInit(
                row=row,
                token_ids=prompt,
                prompt_len=len(prompt),
                num_computed=0,
                sampling=SAMPLINGS[row],
                adapter_slot=SLOTS[row] if adapted else None,
            )
            for row, prompt in enumerate(PROMPTS)
        ]
        blocks = np.arange(BLOCKS * len(PROMPTS)).reshape(-1, len(PROMPTS)).T.tolist()
        first = [
            RowWork(row=row, num_tokens=len(prompt), samples=True, new_block_ids=blocks[row])
            for row, prompt in enumerate(PROMPTS)
        ]
        last = runner.launch(StepPlan(step_id=1, work=first, new_rows=inits))
        for step_id in range(2, STEPS + 2):
            work = [RowWork(row=row, num_tokens=1, samples=True, max_drafts=drafts) for row in range(len(PROMPTS))]
            step = runner.launch(StepPlan(step_id=step_id, work=work))
            self.num_ahead += not last.settled
            self._take(last)
            last = step
        self._take(last)

    def _take(self, step: StepHandle) -> None:
        result = step.result()
        assert result is not None
        rows: list[RowResult] = result.rows
        for row in rows:
            assert row.error is None
            self.tokens[row.row] += row.token_ids
            self.num_accepted += len(row.token_ids) - 1


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("name", "num_adapters"), [("qwen3", 2), ("gemma2", 0)])
def test_replays_with_drafts_in_flight_equal_eager_steps(tmp_path: Path, name: str, num_adapters: int) -> None:
    """All steps but the first are launched ahead; tokens are those of steps without drafts."""
    folder = save_tiny_model(BY_NAME[name], tmp_path)
    adapters = [save_random_adapter(folder, tmp_path / f"a{n}", rank=4 + n, seed=n) for n in range(num_adapters)]
    replayed, padded = (Course(folder, adapters, capture, DRAFTS) for capture in (recorded, eagerly))
    assert replayed.num_ahead == STEPS and replayed.num_accepted >= 5
    assert replayed.num_replays >= 8
    assert replayed.tokens == padded.tokens
    for mine, its in zip(replayed.model.logits, padded.model.logits, strict=True):
        assert torch.equal(mine, its)
    assert torch.equal(replayed.kv.slab, padded.kv.slab)
    plain = Course(folder, adapters, None, 0)
    assert plain.num_replays == 0 == plain.num_accepted
    for mine, its in zip(replayed.tokens, plain.tokens, strict=True):
        assert len(mine) >= len(its) and mine[: len(its)] == its
