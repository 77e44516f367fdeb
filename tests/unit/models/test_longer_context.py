"""What a --max-model-len beyond the model's context says: how to ask for scaling, or that there is none."""

import json
import re
from typing import Any

import pytest

from tandem.configs.errors import SettingsError
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tandem.workers.planning.resolve import resolve_max_model_len
from tandem.workers.planning.start_notes import model_notes
from tests.unit.models.test_family_configs import BASE

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED = {"original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, **TRAINED}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **TRAINED}
POSITIONS = {"max_position_embeddings": 512}
BLOOM: dict[str, Any] = {"n_embed": 64, "n_layer": 2, "num_attention_heads": 4, "seq_length": 512}
GPT_OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 64}


def refusal(config: dict[str, Any], asked: int) -> str:
    settings = EngineSettings(model=ModelSettings(model="m", max_model_len=asked))
    with pytest.raises(SettingsError) as refused:
        resolve_max_model_len(settings, spec_from_config(config))
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Llama", {}),
        ("Llama", {"rope_scaling": {**LLAMA3, **TRAINED}}),
        ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("Qwen3", {"rope_scaling": {**YARN, "beta_fast": 16.0, "attention_factor": 1.5, "truncate": False}}),
        ("Gemma3", {"sliding_window": 64}),
        ("Gemma3", {"sliding_window": 64, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("GptOss", GPT_OSS),
        ("SmolLM3", {}),
    ],
)
def test_the_overrides_of_the_error_make_it_as_long(name: str, changes: dict[str, Any]) -> None:
    config = {**BASE, "architectures": [f"{name}ForCausalLM"], **POSITIONS, **changes}
    asked = 5000
    words = refusal(config, asked)
    advice = re.search("positions that it was not trained for need scaling.*--hf-overrides '(.*)'", words)
    assert advice is not None, words
    longer = spec_from_config(config, json.loads(advice[1]))
    assert longer.max_position_embeddings >= asked
    (own, *_), (scaled, *_) = (
        [r for r in one.ropes if r.theta != 1e4] or one.ropes for one in (spec_from_config(config), longer)
    )
    assert scaled.kind == "yarn" and scaled.theta == own.theta
    assert scaled.factor * scaled.trained_context >= asked and scaled.trained_context == own.trained_context
    if own.kind == "yarn":
        assert (scaled.beta_fast, scaled.attention_factor, scaled.truncate) == (
            own.beta_fast,
            own.attention_factor,
            own.truncate,
        )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**BLOOM, "vocab_size": 100, "architectures": ["BloomForCausalLM"]}, "no rotary positions that could be"),
        ({**BASE, "architectures": ["Phi3ForCausalLM"], **POSITIONS, "rope_scaling": LONG}, "longrope's factors are"),
    ],
)
def test_a_model_that_cannot_be_made_longer_says_so(config: dict[str, Any], words: str) -> None:
    assert f"; it cannot be made longer, as {'the model has ' if 'no ' in words else ''}{words}" in refusal(
        config, 5000
    )
    assert "longer" not in refusal(config, -1)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (128, "longrope: the short factors, as --max-model-len 128 is within the trained 128 tokens"),
        (129, "longrope: the long factors for all prompts, as --max-model-len 129 is beyond the trained 128 tokens; "),
        (None, "longrope: the long factors for all prompts, as --max-model-len 512 is beyond the trained 128 tokens; "),
    ],
)
def test_the_choice_of_longropes_factors_is_told(asked: int | None, words: str) -> None:
    spec = spec_from_config({**BASE, "architectures": ["Phi3ForCausalLM"], **POSITIONS, "rope_scaling": LONG})
    settings = EngineSettings(model=ModelSettings(model="m", max_model_len=asked))
    (line,) = model_notes(settings, spec.for_context(asked or 512))
    assert line.startswith(words)
    assert model_notes(settings, spec_from_config({**BASE, "architectures": ["LlamaForCausalLM"]})) == ()
