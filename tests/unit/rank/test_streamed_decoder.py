"""A whole decoder on the CUDA platform over fake streams: overlapping steps, with layers that stream, give the tokens
of one step at a time on the CPU platform."""

from pathlib import Path

import pytest
import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.messages.step import RowInit, RowSampling, RowWork, StepPlan
from tandem.workers.models.decoder import build_decoder
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.kv_layout import kv_layouts
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.kv_cache import KVCache
from tandem.workers.rank.model_runner import ModelRunner
from tandem.workers.rank.row_table import RowTable
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tests.support.traced_accelerator import TracedAccelerator, traced_platform

PROMPTS = [[5, 6, 7], list(range(3, 40)), [9]]
SAMPLINGS = [RowSampling(temperature=0.0), RowSampling(temperature=1.0, top_p=0.9, seed=3, logprobs=2)]
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-gqa"], tmp_path_factory.mktemp("models"))


def tokens_of(folder: Path, platform: Platform, streamed: tuple[int, ...], depth: int) -> list[list[int]]:
    """Tokens of all rows, with up to `depth` steps launched before a result is read."""
    spec = load_spec(folder)
    decoder = build_decoder(
        spec, ParallelContext.single(), folder=folder, dtype=torch.float32, platform=platform, streamed=streamed
    )
    kv = KVCache.allocate(kv_layouts(spec, Mesh()), 16, 16, torch.float32, platform)
    table = RowTable(len(PROMPTS), 80, 16, spec.vocab_size)
    runner = ModelRunner(decoder, ParallelContext.single(), kv, table, platform)
    inits = [
        RowInit(row=row, token_ids=prompt, prompt_len=len(prompt), num_computed=0, sampling=SAMPLINGS[row % 2])
        for row, prompt in enumerate(PROMPTS)
    ]
    blocks = iter(range(16))
    first = [
        RowWork(row=row, num_tokens=len(prompt), samples=True, new_block_ids=[next(blocks) for _ in range(4)])
        for row, prompt in enumerate(PROMPTS)
    ]
    steps, tokens = [runner.launch(StepPlan(step_id=1, work=first, new_rows=inits))], [list[int]() for _ in PROMPTS]
    for step_id in range(2, STEPS + depth + 1):
        if len(steps) == depth or step_id > STEPS:
            result = steps.pop(0).result()
            assert result is not None
            for row in result.rows:
                tokens[row.row] += row.token_ids
                assert (row.logprobs is not None) == (row.row == 1)
        if step_id <= STEPS:
            work = [RowWork(row=row, num_tokens=1, samples=True) for row in range(len(PROMPTS))]
            steps.append(runner.launch(StepPlan(step_id=step_id, work=work)))
    runner.close()
    assert not steps
    return tokens


@pytest.mark.parametrize("streamed", [(), (0, 2, 3)], ids=["resident", "streamed"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_tokens_as_on_cpu(folder: Path, streamed: tuple[int, ...], depth: int) -> None:
    expected = tokens_of(folder, CpuPlatform(), (), 1)
    accelerator = TracedAccelerator()
    with accelerator.tracing():
        platform = traced_platform(accelerator)
        assert tokens_of(folder, platform, streamed, depth) == expected
        assert not accelerator.pinned, "closing gives the pinned memory back"
    assert all(len(tokens) == STEPS for tokens in expected)
