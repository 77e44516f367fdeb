"""A model of twice the device's budget: most of its layers stream from host memory through two buffers, and the text of
requests of mixed length, served at once, equals the text with all weights on the device, in float32 and bf16."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem import LLM, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.limits import available_cores
from tandem.workers.models.decoder import Decoder
from tandem.workers.planning.budget import GIB
from tests.support.in_process import runner_of
from tests.support.tiny_models import BY_NAME, save_tiny_model

NUM_LAYERS = 12
PREFIX = [3 + (5 * k) % 190 for k in range(40)]
PROMPTS = [(PREFIX if i % 2 else []) + [4 + (11 * i + 7 * k) % 190 for k in range(1 + 13 * (i // 2))] for i in range(8)]
LENGTHS = [24 - 2 * i for i in range(len(PROMPTS))]
SMALL: dict[str, Any] = {
    "tokenizer": str(DEMO_MODEL),
    "device": "cpu",
    "block_size": 4,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 48,
}
BESIDE, BY_THREADS = "copied beside steps", "copied by the computing threads"
COPIERS = {BESIDE: 1, BY_THREADS: available_cores()}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a dozen layers: without them, tables and buffers alone would be more than half of it."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            tiny = replace(BY_NAME[name], changes={**BY_NAME[name].changes, "num_hidden_layers": NUM_LAYERS})
            made[name] = save_tiny_model(tiny, tmp_path_factory.mktemp("deep"))
        return made[name]

    return folder


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """An LLM of one rank sets this process's thread count."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def decoder_of(llm: LLM) -> Decoder:
    model = runner_of(llm._executor)._model
    assert isinstance(model, Decoder)
    return model


def said(llm: LLM) -> list[tuple[str, list[int]]]:
    """Text and tokens of all prompts, asked at once; and again, with the prompts' KV in the cache."""
    params = [SamplingParams(max_tokens=length, temperature=0, ignore_eos=True) for length in LENGTHS]
    waves = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
    assert any(output.cached_tokens for output in waves[1])
    return [(output.text, output.outputs[0].token_ids) for wave in waves for output in wave]


@pytest.mark.parametrize(
    ("name", "dtype", "copier"),
    [
        ("qwen3", "float32", BESIDE),
        ("qwen3", "bfloat16", BY_THREADS),
        ("llama-gqa", "float32", BY_THREADS),
        ("llama-gqa", "bfloat16", BESIDE),
        pytest.param("qwen3", "float32", BY_THREADS, marks=pytest.mark.parity),
        pytest.param("qwen3", "bfloat16", BESIDE, marks=pytest.mark.parity),
        pytest.param("llama-gqa", "float32", BESIDE, marks=pytest.mark.parity),
        pytest.param("llama-gqa", "bfloat16", BY_THREADS, marks=pytest.mark.parity),
    ],
)
def test_a_model_of_twice_the_device_writes_the_same_text(
    name: str, dtype: str, copier: str, deep: Callable[[str], Path]
) -> None:
    """make test has every pair of model, dtype and copier, make parity all three together."""
    flags = {**SMALL, "dtype": dtype, "cpu_threads": COPIERS[copier]}
    with LLM(deep(name), **flags) as whole:
        wanted = said(whole)
        weight_bytes = decoder_of(whole).weight_bytes
        assert decoder_of(whole).stream.host_bytes == 0
    assert [len(tokens) for _, tokens in wanted] == LENGTHS * 2
    with LLM(deep(name), **flags, cpu_offload_gb=weight_bytes / 2 / GIB) as llm:
        decoder = decoder_of(llm)
        on_device = decoder.weight_bytes - decoder.stream.host_bytes + decoder.stream.buffer_bytes
        assert decoder.weight_bytes == weight_bytes and on_device <= weight_bytes / 2
        assert said(llm) == wanted
