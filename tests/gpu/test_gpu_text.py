"""An engine on a GPU: greedy texts of every family are those of transformers in float32, with replayed steps; adapters,
a host tier, drafts and grammars write what they write on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.workers.graphs.graph_runner import GraphRunner
from tandem.workers.kernels.triton.late_kernels import LATE
from tandem.workers.messages.sampling_ranges import StructuredOutputsParams
from tests.support.adapters import save_random_adapter
from tests.support.in_process import runner_of
from tests.support.paged_rows import prompt_ids
from tests.support.tiny_models import ONE_OF_EACH, SHALLOW, greedy_after, load_peer

TOKENS = 48
ROOM: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 160, "tune": False}
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_k=4, seed=11, n=2, max_tokens=16, ignore_eos=True)
JSON = SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(json={"type": "object"}))
PREFIX = prompt_ids(40, 700, seed=5)
PROMPTS = [(PREFIX if row % 2 else []) + prompt_ids(3 + 4 * row, 700, seed=row) for row in range(12)]


def graphs_of(llm: LLM) -> GraphRunner:
    model = runner_of(llm._executor)._model
    graphs: GraphRunner = model.graphs  # type: ignore[attr-defined]
    return graphs


def texts_of(llm: LLM, prompts: list[list[int]], params: SamplingParams, **more: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **more)
    assert [choice.error for output in outputs for choice in output.outputs if choice.error] == []
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


@pytest.mark.parametrize("name", [*ONE_OF_EACH, *SHALLOW])
def test_texts_are_those_of_transformers(name: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(name)
    prompts = [prompt_ids(2 + 7 * row, 200, seed=row) for row in range(8)]
    with LLM(
        folder, tokenizer=str(DEMO_MODEL), device="cuda", dtype="float32", num_gpu_blocks_override=160, **ROOM
    ) as llm:
        found = texts_of(llm, prompts, GREEDY)
        graphs = graphs_of(llm)
        assert graphs.can_replay and graphs.num_replays > TOKENS // 2
    peer = load_peer(folder)
    for prompt, (mine,) in zip(prompts, found, strict=True):
        assert len(mine) == TOKENS and mine == greedy_after(peer, prompt, mine)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "preemption": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
    "host tier": {"num_gpu_blocks_override": 24, "kv_offloading_size": 0.05},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}},
    "drafts and a tier": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
        "num_gpu_blocks_override": 28,
        "kv_offloading_size": 0.05,
    },
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    kinds = ("q_proj", "v_proj"), ("gate_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
    return [
        save_random_adapter(DEMO_MODEL, folder / str(n), rank=(8, 16, 64)[n], seed=n, modules=modules)
        for n, modules in enumerate(kinds)
    ]


def all_texts(device: str, adapters: list[Path], flags: dict[str, Any]) -> list[Any]:
    """Greedy, seeded and structured texts of rows with adapters and without, twice."""
    with LLM(
        "demo", device=device, dtype="float32", enable_lora=True, max_loras=4, max_lora_rank=64, **ROOM | flags
    ) as llm:
        loaded = [*(llm.load_adapter(folder) for folder in adapters), None]
        refs = {"lora_request": [loaded[row % 4] for row in range(len(PROMPTS))]}
        found: list[Any] = []
        for _ in range(2):
            found += [texts_of(llm, PROMPTS, params, **refs) for params in (GREEDY, SEEDED)]
        found.append(texts_of(llm, PROMPTS, JSON))
        stats = llm._engine.stats()
        if "num_gpu_blocks_override" in flags:
            assert stats.preemptions > 0
        if "speculative_config" in flags:
            assert stats.drafts is not None and stats.drafts.num_accepted > 0
        if device == "cuda":
            graphs = graphs_of(llm)
            assert graphs.can_replay and graphs.num_replays > 0
            assert LATE.names == [], "a kernel was compiled after the start"
    return found


@pytest.fixture(scope="module")
def on_cpu(adapters: list[Path]) -> list[Any]:
    threads = torch.get_num_threads()
    found = all_texts("cpu", adapters, {})
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("case", CASES)
def test_rows_write_what_they_write_on_a_cpu(case: str, adapters: list[Path], on_cpu: list[Any]) -> None:
    assert all_texts("cuda", adapters, {"kv_cache_memory_bytes": 2**28} | CASES[case]) == on_cpu


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_quantized_caches_change_few_texts(kv_cache_dtype: str) -> None:
    """In float32, where torch's SDPA attends."""
    texts = []
    for dtype in ("auto", kv_cache_dtype):
        flags = {"kv_cache_dtype": dtype, "kv_cache_memory_bytes": 2**28}
        with LLM("demo", device="cuda", dtype="float32", **ROOM | flags) as llm:
            texts.append(texts_of(llm, PROMPTS, GREEDY))
            assert graphs_of(llm).num_replays > 0
    assert sum(mine == theirs for mine, theirs in zip(*texts, strict=True)) >= len(PROMPTS) // 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("kv_cache_dtype", "most_nats"), [("auto", 0.5), ("int8", 0.5), ("fp8", 4.0)])
def test_half_precision_writes_likely_tokens(dtype: str, kv_cache_dtype: str, most_nats: float) -> None:
    """Each token is at most so many nats less likely than the likeliest, by transformers in float32. On a CPU they are
    0.07, 0.04 and 1.7."""
    flags = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "kv_cache_memory_bytes": 2**28}
    with LLM("demo", device="cuda", **ROOM | flags) as llm:
        found = texts_of(llm, PROMPTS, GREEDY)
        assert graphs_of(llm).num_replays > 0
    peer = load_peer(DEMO_MODEL)
    for prompt, (mine,) in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            logits_TV = peer(torch.tensor([[*prompt, *mine]])).logits[0, len(prompt) - 1 : -1]
        own_T = logits_TV.gather(1, torch.tensor(mine)[:, None])[:, 0]
        assert (logits_TV.amax(1) - own_T).max() < most_nats


def test_the_pool_takes_what_is_left_of_the_device() -> None:
    """Without a flag for its size: three quarters of the device hold the pool, and texts come."""
    free, total = torch.cuda.mem_get_info()
    share = 0.75 * free / total
    with LLM("demo", device="cuda", gpu_memory_utilization=share, **ROOM) as llm:
        assert torch.cuda.mem_get_info()[0] < free - 0.5 * share * total
        assert len(texts_of(llm, PROMPTS, GREEDY)) == len(PROMPTS)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - 2**30
