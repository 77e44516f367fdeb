"""Families whose layers differ from Llama's through the whole engine: drafts, preemption, a host tier, streamed weights
and prefix hits at once. 64 greedy tokens are those of transformers, in float32."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem import LLM, SamplingParams
from tests.support.tiny_models import BY_NAME, SHALLOW, greedy_after, load_peer, save_tiny_model

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"
VOCAB, TOKENS = 768, 64
WORDS = [[7 + (i * j) % 40 for i in range(20 + 8 * j)] for j in range(1, 6)]
"""Prompts with repetitions, so that there is something to look up."""


IN_TEST = ["gemma2", "gpt2", "bloom", "mixtral", "gemma3", "deepseek_v3"]
IN_PARITY = [
    "llama-gqa",
    "mistral-window",
    "qwen2",
    "qwen3",
    "smollm3",
    *(name for name in SHALLOW if name not in IN_TEST),
]


@pytest.fixture(
    scope="module", params=[*IN_TEST, *(pytest.param(name, marks=pytest.mark.parity) for name in IN_PARITY)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo's tokenizer."""
    tiny = BY_NAME[request.param]
    larger = replace(tiny, changes={**tiny.changes, "vocab_size": VOCAB})
    saved = save_tiny_model(larger, tmp_path_factory.mktemp("served"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, saved)
    return saved


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    threads = torch.get_num_threads()
    with LLM(
        str(folder),
        dtype="float32",
        cpu_threads=1,
        tune=False,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=16,
        kv_offloading_size=0.02,
        cpu_offload_gb=1e-4,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3},
    ) as engine:
        yield engine
    torch.set_num_threads(threads)


def test_texts_are_those_of_transformers(folder: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in (*WORDS, *WORDS)]
    found = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    peer = load_peer(folder)
    for ids, ours, again in zip(WORDS, found[: len(WORDS)], found[len(WORDS) :], strict=True):
        assert len(ours) == TOKENS
        assert list(ours) == list(again) == greedy_after(peer, ids, list(ours))
