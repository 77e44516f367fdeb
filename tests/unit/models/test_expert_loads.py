"""Loads of experts: each token is counted once for each of its experts on each layer of all stages, and the counts
reach the statistics."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
)
from tandem.workers.build import model_facts
from tandem.workers.engine.base import expert_reports
from tandem.workers.engine.base.expert_reports import ExpertStats
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.messages.request import GenerationRequest
from tests.support.engine_ranks import Told
from tests.support.thread_servers import thread_group
from tests.support.tiny_models import BY_NAME, TinyModel, save_tiny_model

PROMPT, TOKENS, EXPERTS, TOP_K = [5, 6, 7, 8, 9], 4, 4, 2
DENSE_FIRST = TinyModel("dense-first", "qwen3_moe", {**BY_NAME["qwen3_moe-sparse"].changes, "num_hidden_layers": 5})
"""The first of its layers has no experts; a first stage of two has layers 0 to 2."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def _asked_behind_every_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    monkeypatch.setattr(expert_reports, "PERIOD_S", 0.0)
    yield
    torch.set_num_threads(threads)


def turn_to_the_end(engine: Engine) -> ExpertStats:
    """Turns it as an EngineLoop does, until nothing is due."""
    while engine.has_work() or engine.is_copying or engine.idle_s == 0.0:
        engine.turn(0.01)
    found = engine.stats().experts
    assert found is not None
    return found


def check(found: ExpertStats, layers: range) -> None:
    """The tokens of the warm-up are not counted."""
    assert len(found.tokens) == EXPERTS and list(found.imbalance) == [*layers]
    assert sum(found.tokens) == (len(PROMPT) + TOKENS - 1) * TOP_K * len(layers)
    assert all(1 <= ratio <= EXPERTS for ratio in found.imbalance.values())


def test_every_token_is_counted(tmp_path: Path) -> None:
    folder = save_tiny_model(BY_NAME["mixtral"], tmp_path)
    with LLM(str(folder), tokenizer="demo", dtype="float32", max_model_len=64) as llm:
        assert llm._engine.stats().experts is None
        llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
        check(llm.local.ask(turn_to_the_end), range(4))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_of_all_stages_are_counted(tmp_path: Path, tp_size: int) -> None:
    """Each once, however many ranks a stage has."""
    settings = EngineSettings(
        model=ModelSettings(model=str(save_tiny_model(DENSE_FIRST, tmp_path)), dtype="float32"),
        parallel=ParallelSettings(tensor_parallel_size=tp_size, pipeline_parallel_size=2),
        cache=CacheSettings(block_size=4, num_blocks=32),
        scheduler=SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=16),
        device=DeviceSettings(device="cpu", cpu_threads=1),
    )
    group, told = thread_group(settings), Told()
    try:
        ready = group.start()
        engine = build_engine(settings, model_facts(settings, ready), group, ready, told)
        engine.add_request(GenerationRequest(request_id="r", prompt_token_ids=PROMPT, sampling=GREEDY))
        check(turn_to_the_end(engine), range(1, 5))
    finally:
        group.close()
    assert len(told.tokens["r", 0]) == TOKENS
