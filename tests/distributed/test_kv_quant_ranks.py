"""The real engine over a quantized cache: preemption, shared and copied blocks, and every cut of the ranks leave the
tokens as they are (float32; a code that rounds the other way could only matter at a near-tie)."""

import contextlib
from pathlib import Path

import pytest

from configs.schema import (
    CacheSettings,
    DeviceSettings,
    EngineSettings,
    ModelSettings,
    ParallelSettings,
    SchedulerSettings,
)
from tests.support.tiny_models import BY_NAME, save_tiny_model
from workers.build import model_facts, open_executor
from workers.engine.engine import Engine
from workers.messages import Ended, GenerationRequest, SamplingParams, TokenDelta

NUM_TOKENS = 14
Undisturbed = dict[str, dict[tuple[str, int], list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(BY_NAME["llama-wide-heads"], tmp_path_factory.mktemp("models"))


class Tokens:
    """OutputSink that keeps every choice's tokens and the prompt tokens found in the cache."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[str, int] = {}

    def deltas(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            self.of.setdefault((delta.request_id, delta.choice), []).extend(delta.token_ids)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        assert ended.refused is None and set(ended.finish_reasons) == {"length"}, ended
        self.cached[ended.request_id] = ended.usage.cached_tokens


def settings_for(
    folder: Path, kv: str, *, tp: int = 1, pp: int = 1, num_blocks: int = 160, chunk: int = 64
) -> EngineSettings:
    return EngineSettings(
        model=ModelSettings(model=str(folder), dtype="float32"),
        parallel=ParallelSettings(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        cache=CacheSettings(block_size=4, num_blocks=num_blocks, kv_cache_dtype=kv),  # type: ignore[arg-type]
        scheduler=SchedulerSettings(max_num_seqs=8, max_num_batched_tokens=chunk),
        device=DeviceSettings(device="cpu"),
    )


def prompt(request: int) -> list[int]:
    return [3 + (7 * request + 5 * k) % 190 for k in range(2 + 15 * request)]


def serve(settings: EngineSettings, requests: list[tuple[int, SamplingParams]]) -> tuple[Tokens, int]:
    """All requests at once; their tokens, and how often one was preempted."""
    sink = Tokens()
    with contextlib.closing(open_executor(settings)) as executor:
        ready = executor.start()
        assert ready.kv_dtype == {"fp8": "fp8_e4m3"}.get(settings.cache.kv_cache_dtype, settings.cache.kv_cache_dtype)
        engine = Engine(settings, model_facts(settings, ready), executor, ready, sink)
        for place, (number, sampling) in enumerate(requests):
            request = GenerationRequest(request_id=str(place), prompt_token_ids=prompt(number), sampling=sampling)
            engine.add_request(request)
        while engine.has_work():
            engine.step()
        return sink, engine.stats().preemptions


def mixed_requests() -> list[tuple[int, SamplingParams]]:
    return [
        (i, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=i, n=1 + i % 2, temperature=0.5 * (i % 3)))
        for i in range(6)
    ]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Undisturbed:
    """Per storage dtype what one rank with enough blocks says."""
    said = {}
    for kv in ("int8", "fp8"):
        tokens, preemptions = serve(settings_for(folder, kv), mixed_requests())
        assert preemptions == 0 and len(tokens.of) == 9
        said[kv] = tokens.of
    return said


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_preempted_and_recomputed_rows_say_the_same(folder: Path, kv: str, undisturbed: Undisturbed) -> None:
    tokens, preemptions = serve(settings_for(folder, kv, num_blocks=48, chunk=24), mixed_requests())
    assert preemptions > 0 and tokens.of == undisturbed[kv]


@pytest.mark.parametrize(("kv", "tp", "pp"), [("int8", 2, 1), ("int8", 1, 2), ("fp8", 2, 1)])
def test_any_cut_says_what_one_rank_says(folder: Path, undisturbed: Undisturbed, kv: str, tp: int, pp: int) -> None:
    assert serve(settings_for(folder, kv, tp=tp, pp=pp), mixed_requests())[0].of == undisturbed[kv]


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_choices_that_share_and_copy_blocks_say_what_one_says(folder: Path, kv: str) -> None:
    """Four greedy choices of prompts that end inside a block; and the prompt once more, found in the cache."""
    greedy = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0, n=4)
    alone = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
    for number in (1, 3, 4):
        single = serve(settings_for(folder, kv), [(number, alone)])[0].of["0", 0]
        settings = settings_for(folder, kv, chunk=20)
        forked, _ = serve(settings, [(number, greedy), (number, alone)])
        assert list(forked.of.values()) == [single] * 5
