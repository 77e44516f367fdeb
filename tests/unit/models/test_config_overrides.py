"""--hf-overrides win over every spelling of config.json, and leave what they do not name."""

import re
from typing import Any

import pytest

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec, RopeKind, RopeSpec
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tandem.workers.models.spec.config.rope_config import KEYS
from tests.unit.models.test_family_configs import BASE, MPT

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
NEW = {"rope_type": "default", "rope_theta": 1e6}
GPT: dict[str, Any] = {"vocab_size": 100, "n_embd": 64, "n_layer": 2, "n_head": 4}
BLOOM: dict[str, Any] = {"vocab_size": 100, "n_embed": 64, "n_layer": 2, "num_attention_heads": 4}
GEMMA = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 3e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    }
}


def spec_of(architecture: str, config: dict[str, Any], overrides: dict[str, Any]) -> ArchSpec:
    return spec_from_config({"architectures": [architecture], **config}, overrides)


def rope_of(architecture: str, config: dict[str, Any], overrides: dict[str, Any]) -> RopeSpec:
    [found] = spec_of(architecture, {**BASE, **config}, overrides).ropes
    return found


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_thetta": 5.0}, "rope_thetta is not a key that Qwen3ForCausalLM reads; did you mean rope_theta?"),
        ({"model_type": "qwen3"}, "model_type is not a key that Qwen3ForCausalLM reads"),
        ({"bos_token_id": 5}, "bos_token_id is not a key that Qwen3ForCausalLM reads"),
        ({"rope_scaling": {**YARN, "faktor": 2}}, "rope_scaling.faktor is not one of rope_type, type, rope_theta"),
        ({"hidden_size": "64"}, "hidden_size is '64', want a positive integer"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs 'factor'"),
        ({"rope_scaling": 4}, "rope_scaling is 4, want an object"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor is not read by the rope type 'default'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
            "rope_scaling.beta_fast is not read by the rope type 'linear'",
        ),
        ({"rope_parameters": {"full_atention": NEW}}, "rope_parameters.full_atention is not one of full_attention"),
        (
            {"rope_parameters": {"full_attention": NEW, "rope_theta": 5.0}},
            "rope_parameters.rope_theta is not read beside full_attention",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factr": 4}},
            f"rope_parameters.factr is not one of {', '.join(KEYS)}; did you mean factor?",
        ),
        ({"rope_parameters": YARN, "rope_scaling": YARN}, "rope_parameters and rope_scaling are two names of one"),
    ],
)
def test_what_is_wrong_with_an_override_names_the_flag(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^--hf-overrides: {re.escape(words)}") as refused:
        spec_of("Qwen3ForCausalLM", BASE, overrides)
    assert refused.value.flag == "--hf-overrides"


def test_an_override_beside_a_wrong_config_is_not_blamed() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^MODEL: config.json: hidden_size is 1.5") as refused:
        spec_of("Qwen3ForCausalLM", {**BASE, "hidden_size": 1.5}, {"rope_theta": 5.0})
    assert refused.value.flag == "MODEL"


def test_overrides_inside_objects_and_those_read_elsewhere() -> None:
    assert spec_of("Qwen3ForCausalLM", BASE, {"is_matryoshka": True, "torch_dtype": "float16"}).torch_dtype == "float16"
    with pytest.raises(UnsupportedModelError, match=r"attn_config.alibbi is not a key that MptForCausalLM reads"):
        spec_of("MptForCausalLM", MPT, {"attn_config": {"alibi": True, "alibbi": True}})


@pytest.mark.parametrize("published", [{"rope_parameters": NEW}, {"rope_theta": 1e6}])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_overridden_scaling_keeps_the_base(published: dict[str, Any], key: str) -> None:
    rope = rope_of("Qwen3ForCausalLM", published, {key: YARN})
    assert (rope.theta, rope.kind, rope.factor, rope.trained_context) == (1e6, RopeKind.YARN, 4.0, 32768)
    assert rope_of("Qwen3ForCausalLM", published, {key: {**YARN, "rope_theta": 5.0}}).theta == 5.0
    assert rope_of("Qwen3ForCausalLM", published, {key: YARN, "rope_theta": 7.0}).theta == 7.0


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_overridden_scaling_keeps_the_part_that_rotates(key: str) -> None:
    published = {"rope_parameters": {**NEW, "partial_rotary_factor": 0.5}}
    linear = {"rope_type": "linear", "factor": 2.0}
    assert rope_of("StableLmForCausalLM", published, {key: linear}).dim == 8
    assert rope_of("StableLmForCausalLM", published, {key: {**linear, "partial_rotary_factor": 0.125}}).dim == 2
    assert rope_of("StableLmForCausalLM", published, {"partial_rotary_factor": 0.25}).dim == 4
    assert rope_of("GPTNeoXForCausalLM", published, {"rotary_pct": 0.25, "rotary_emb_base": 9.0}).theta == 9.0


def test_an_overridden_trained_context_wins_over_the_top_level() -> None:
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    published = {"max_position_embeddings": 64, "original_max_position_embeddings": 16, "rope_scaling": factors}
    given = {"rope_scaling": {**factors, "original_max_position_embeddings": 32}}
    assert rope_of("Phi3ForCausalLM", published, {}).trained_context == 16
    assert rope_of("Phi3ForCausalLM", published, {"rope_scaling": factors}).trained_context == 16
    assert rope_of("Phi3ForCausalLM", published, given).trained_context == 32


def test_scaling_overridden_with_null_is_gone() -> None:
    published = {"rope_parameters": {**YARN, "rope_theta": 1e6}}
    for key in ("rope_scaling", "rope_parameters"):
        rope = rope_of("Qwen3ForCausalLM", published, {key: None})
        assert (rope.theta, rope.kind) == (1e6, RopeKind.DEFAULT)


@pytest.mark.parametrize(
    ("overrides", "bases"),
    [
        ({}, (20000.0, 3e6)),
        ({"rope_local_base_freq": 777}, (777.0, 3e6)),
        ({"rope_theta": 5e5}, (20000.0, 5e5)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, (20000.0, 3e6)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, (20000.0, 5.0)),
    ],
)
def test_each_base_of_gemma3_alone(overrides: dict[str, Any], bases: tuple[float, float]) -> None:
    layers = spec_of("Gemma3ForCausalLM", {**BASE, **GEMMA}, overrides).layers
    local, full = layers[0].position, layers[5].position
    assert local is not None and full is not None
    assert (local.theta, full.theta) == bases and local.kind is RopeKind.DEFAULT


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("GPT2LMHeadModel", GPT),
        ("GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
        ("BloomForCausalLM", BLOOM),
        ("MptForCausalLM", MPT),
    ],
)
def test_transformers_other_spellings(architecture: str, config: dict[str, Any]) -> None:
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6}
    read = spec_of(architecture, config, {})
    assert (read.hidden_size, read.num_layers, read.layers[0].attention.num_heads) == (64, 2, 4)
    given = spec_of(architecture, config, sizes)
    assert (given.hidden_size, given.num_layers, given.layers[0].attention.num_heads) == (96, 3, 6)
    if config is not BLOOM:  # only it has both: n_embed would win over hidden_size
        assert spec_of(architecture, {**config, **sizes}, {}) == given


def test_the_positions_of_gpt2_in_both_spellings() -> None:
    published = {**GPT, "n_positions": 1024}
    for key in ("n_positions", "max_position_embeddings"):
        assert spec_of("GPT2LMHeadModel", published, {key: 64}).max_position_embeddings == 64
    both = {**published, "max_position_embeddings": 32}
    assert spec_of("GPT2LMHeadModel", both, {}).max_position_embeddings == 32
    assert spec_of("GPT2LMHeadModel", both, {"n_positions": 64}).max_position_embeddings == 64
