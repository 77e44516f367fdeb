"""What a decode step on a device costs the host, counted under the traced accelerator. These bounds may only fall:
kernels and graphs bring them to 10 operators a layer. All that a step needs comes in one copy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.configs.schema import CacheSettings, EngineSettings, ModelSettings, SchedulerSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.graphs.cuda_graphs import Replay
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.messages.thinking import ThinkingBudget
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.row_table import RowTable
from tandem.workers.rank.start.captures import sizes_of
from tests.support.platforms import GpuOnHost
from tests.support.recorded_graph import recorded
from tests.support.tiny_models import TinyModel, save_tiny_model
from tests.support.traced_accelerator import TracedAccelerator

ROWS, PROMPT = 4, 9
GREEDY = RowSampling(temperature=0.0)
ALL_FIELDS = RowSampling(
    temperature=1.0,
    top_p=0.9,
    top_k=40,
    min_p=0.01,
    seed=7,
    choice=1,
    min_tokens=30,
    stop_token_ids=(1, 2),
    logprobs=3,
    presence_penalty=0.5,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias=((3, 1.0), (4, -2.0)),
    allowed_token_ids=tuple(range(100)),
    bad_words_token_ids=((5,), (6, 7)),
    thinking_budget=ThinkingBudget(tokens=1, start=(40,), end=(41, 42), inside=True),
)
RANDOM = RowSampling(
    temperature=0.9, min_p=0.01, top_k=20, top_p=0.8, seed=7, repetition_penalty=1.1, frequency_penalty=0.2,
    logit_bias=((3, 1.0),), min_tokens=30, stop_token_ids=(1, 2), bad_words_token_ids=((5,),),
)  # fmt: skip
RULED = RowSampling(
    temperature=0.9, seed=7, repetition_penalty=1.1, logprobs=3, allowed_token_ids=tuple(range(100)),
    bad_words_token_ids=((5,), (6, 7)),
    thinking_budget=ThinkingBudget(tokens=1, start=(40,), end=(41, 42), inside=True),
)  # fmt: skip
OPERATORS_PER_LAYER = 20
OPERATORS_BESIDE_A_REPLAY = 1
"""The step's arrays go from the buffer of the copy to where the capture reads them."""
OPERATORS_BETWEEN_REPLAYS = 2
"""Those of a draw with rules do, and the positions of its places."""
DOWNLOADS = {"greedy": 2, "all fields": 6}
"""Ids and greatest logits; log probabilities are four tensors more."""


def decode_counts(folder: Path, num_layers: int, sampling: RowSampling, *, captured: bool = False) -> dict[str, int]:
    """Counts of launching the third decode step while the two before are in flight, and of waiting for it ("waits").
    captured: steps are replayed, whose operators do not count."""
    model = save_tiny_model(TinyModel(f"of-{num_layers}", "qwen3", {"num_hidden_layers": num_layers}), folder)
    spec, accelerator = load_spec(model), TracedAccelerator()

    def capture(body: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        replay, outputs = recorded(body)

        def counted() -> None:
            before = accelerator.counts["operators"]
            replay()
            accelerator.counts["operators"] = before
            accelerator.counts["replays"] += 1

        return counted, outputs

    platform = GpuOnHost(accelerator, capture)
    with accelerator.tracing():
        decoder = build_decoder(spec, ParallelContext.single(), folder=model, dtype=torch.float32, platform=platform)
        kv = KVCache.allocate(decoder.kv_layouts, 8, 16, torch.float32, platform)
        settings = EngineSettings(
            model=ModelSettings(model="m"),
            cache=CacheSettings(block_size=16),
            scheduler=SchedulerSettings(max_num_seqs=ROWS, max_num_batched_tokens=ROWS),
        )
        table = RowTable(ROWS, 64, 16, spec.vocab_size)
        runner = ModelRunner(decoder, ParallelContext.single(), kv, table, platform)
        if captured:
            sizes = sizes_of(decoder, kv.tensors, settings, 64)
            runner.make_captures([size for size in sizes if size.num_tokens == ROWS], 0)
        inits = [
            RowInit(row=row, token_ids=[5] * PROMPT, prompt_len=PROMPT, num_computed=0, sampling=sampling)
            for row in range(ROWS)
        ]
        first = [RowWork(row=row, num_tokens=PROMPT, samples=True, new_block_ids=[row]) for row in range(ROWS)]
        steps = [runner.launch(StepPlan(step_id=1, work=first, new_rows=inits))]
        for step_id in (2, 3):
            accelerator.counts.clear()
            work = [RowWork(row=row, num_tokens=1, samples=True) for row in range(ROWS)]
            steps.append(runner.launch(StepPlan(step_id=step_id, work=work)))
        counts = dict(accelerator.counts)
        for step in steps:
            accelerator.counts.clear()
            step.result()
        counts["waits"] = accelerator.counts["synchronizations"]
        decoder.close()
    return counts


@pytest.mark.parametrize(("name", "sampling"), [("greedy", GREEDY), ("all fields", ALL_FIELDS)])
def test_a_decode_step_stays_within_its_budget(tmp_path: Path, name: str, sampling: RowSampling) -> None:
    four, two = (decode_counts(tmp_path, layers, sampling) for layers in (4, 2))
    operators = (four["operators"] - two["operators"]) / 2
    counted = ("uploads", "downloads", "synchronizations", "reads on the host", "waits")
    found = {key: four.get(key, 0) for key in counted}
    assert operators <= OPERATORS_PER_LAYER
    assert found == {
        "uploads": 1,
        "downloads": DOWNLOADS[name],
        "synchronizations": 0,
        "reads on the host": 0,
        "waits": 1,
    }, "one copy brings all of it; launching never waits for the device; its result waits once"


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM, RULED], ids=["greedy", "random", "rules"])
def test_a_captured_step_is_one_upload_one_replay_and_one_download(tmp_path: Path, sampling: RowSampling) -> None:
    """With rules the choice is a second replay behind it; without any a step pays nothing for them."""
    found, ruled = decode_counts(tmp_path, 2, sampling, captured=True), sampling == RULED
    assert found.pop("operators") <= OPERATORS_BESIDE_A_REPLAY + ruled * OPERATORS_BETWEEN_REPLAYS
    assert {key: count for key, count in found.items() if count} == {
        "uploads": 1,
        "downloads": 1,
        "replays": 1 + ruled,
        "waits": 1,
    }
