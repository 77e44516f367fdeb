"""Texts of the demo model with quantized weights: drafts, streaming, two ranks and batch mates change no token."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tandem import LLM, SamplingParams
from tandem.configs.bundled import DEMO_MODEL
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.workers.planning.model_source import model_digest, resolve_model
from tests.support.quantized import gptq, save_quantized

PROMPTS = ["Once upon a time there was a little dog. The little dog", "Count from 3 to 9.", "One day"]
COMMON: dict[str, Any] = {"max_num_seqs": 4, "cpu_threads": 1, "max_model_len": 256}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def tokens_of(model: str = "demo", **flags: Any) -> list[list[int]]:
    with LLM(model, **COMMON, **flags) as llm:
        assert llm.settings.model.quantization == flags.get("quantization")
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_drafts_streamed_layers_and_ranks_change_no_token() -> None:
    given = {"dtype": "float32", "quantization": "int8"}
    expected = tokens_of(**given)
    for more in ({"speculative_config": NGRAM}, {"cpu_offload_gb": 0.01}, {"tensor_parallel_size": 2}):
        assert tokens_of(**given, **more) == expected, more


def test_w8a8_tokens_do_not_depend_on_batch_mates() -> None:
    with LLM("demo", **COMMON, quantization="w8a8", dtype="float32", enable_prefix_caching=False) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
        alone = [llm.generate(prompt, PARAMS, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert together == alone


def test_a_quantized_checkpoint_needs_no_flag(tmp_path: Path) -> None:
    """Nor does it mind vLLM's name for it. Its texts are those of the weights that its codes stand for."""
    folder, plain = save_quantized(DEMO_MODEL, tmp_path, gptq(4, 64, order=True))
    expected = tokens_of(str(plain), dtype="float32")
    drafted = {"quantization": "gptq_marlin", "speculative_config": NGRAM, "kv_offloading_size": 0.05}
    for flags in ({}, drafted, {"batch_invariant": True}):
        assert tokens_of(str(folder), dtype="float32", **flags) == expected
    with pytest.raises(SettingsError, match=r"awq: the checkpoint is quantized already, with gptq \(int4\)"):
        LLM(str(folder), quantization="awq")
    models = [
        resolve_model(build_settings(str(folder), given).engine.model) for given in ({}, {"quantization": "gptq"})
    ]
    assert model_digest(models[0]) == model_digest(models[1]), "one model under both names"


def test_another_name_is_refused() -> None:
    with pytest.raises(SettingsError, match="gptq: the checkpoint's weights are not quantized") as refused:
        LLM("demo", quantization="gptq")
    assert refused.value.flag == "--quantization"


def test_quantized_weights_are_another_model() -> None:
    """To whoever resumes a request, and to KV on disk."""
    model = resolve_model(build_settings("demo", {}).engine.model)
    digests = {model_digest(replace(model, quantization=name)) for name in (None, "int8", "w8a8")}
    assert len(digests) == 3
