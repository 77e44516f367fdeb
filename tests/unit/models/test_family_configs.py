"""config.json of single families as they are published: older spellings, defaults, and what is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec, Moe, NormPlace, QkNorm, RopeSpec
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tests.support.tiny_models import TINY_MODELS

BASE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
MPT: dict[str, Any] = {"vocab_size": 100, "d_model": 64, "n_layers": 2, "n_heads": 4}


def spec_of(name: str, **changes: Any) -> ArchSpec:
    base = MPT if name == "Mpt" else BASE
    return spec_from_config({**base, "architectures": [f"{name}ForCausalLM"], **changes})


def rope_of(spec: ArchSpec) -> RopeSpec:
    [found] = spec.ropes
    return found


def test_both_ropes_of_gemma3_in_both_spellings() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    classic = spec_of(
        "Gemma3", rope_theta=5e5, rope_local_base_freq=7e3, rope_scaling=scaling, sliding_window_pattern=3
    )
    new = spec_of(
        "Gemma3",
        rope_parameters={
            "full_attention": {**scaling, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
        },
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    assert classic == new
    ropes = [layer.position for layer in classic.layers]
    assert [None if rope is None else (rope.theta, rope.factor) for rope in ropes[1:3]] == [(7e3, 1.0), (5e5, 8.0)]
    by_default = spec_of("Gemma3")
    assert [layer.params.window for layer in by_default.layers] == [4096] * 5 + [None]
    assert {rope.theta for rope in by_default.ropes} == {1e6, 1e4}


def test_parts_of_a_head_rotate() -> None:
    assert rope_of(spec_of("GPTNeoX", rotary_pct=0.5, rotary_emb_base=5e3)) == RopeSpec(
        theta=5e3, trained_context=2048, dim=8
    )
    assert rope_of(spec_of("GPTNeoX")).dim == rope_of(spec_of("StableLm")).dim == 4
    assert rope_of(spec_of("StableLm", rope_parameters={"partial_rotary_factor": 1.0})).dim is None
    assert rope_of(spec_of("GPTJ", n_embd=64, n_head=4, n_layer=2, rotary_dim=8)).head_order(16) == (
        *(0, 2, 4, 6), *range(8, 12), *(1, 3, 5, 7), *range(12, 16)
    )  # fmt: skip
    assert rope_of(spec_of("GPTNeoX")).head_order(16) == (0, 1, *range(4, 10), 2, 3, *range(10, 16))
    assert rope_of(spec_of("Llama")).head_order(16) == ()
    with pytest.raises(UnsupportedModelError, match="5 of a head's 16 elements"):
        spec_of("StableLm", partial_rotary_factor=0.35)


def test_longrope_in_its_spellings() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    changes = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    spec = spec_of("Phi3", rope_scaling={"type": "su", **factors}, **changes)
    assert spec == spec_of("Phi3", rope_scaling={"rope_type": "longrope", **factors}, **changes)
    assert rope_of(spec).factors == (2.0,) * 8 and spec.max_position_embeddings == 64
    assert spec.for_context(17) is spec
    assert rope_of(spec.for_context(16)) == replace(rope_of(spec), factors=(1.0,) * 8)


def test_the_trained_context_that_phi3_has_by_default() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = rope_of(spec_of("Phi3", max_position_embeddings=131072, rope_scaling=scaling))
    assert (rope.trained_context, rope.factor) == (4096, 32.0)
    own = {**scaling, "original_max_position_embeddings": 8192}
    assert rope_of(spec_of("Phi3", max_position_embeddings=131072, rope_scaling=own)).trained_context == 8192


def test_contexts_as_they_are_published() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    gemma = spec_of("Gemma3", max_position_embeddings=131072, rope_scaling=linear)
    assert gemma.max_position_embeddings == 131072
    assert spec_of("Llama", max_position_embeddings=100, rope_scaling=linear).max_position_embeddings == 800
    assert spec_of("Cohere", max_position_embeddings=8192).max_position_embeddings == 8192
    command_r = spec_of("Cohere", max_position_embeddings=8192, model_max_length=131072)
    assert command_r.max_position_embeddings == 131072


def test_bloom_and_mpt_as_they_are_published() -> None:
    bloom = {"vocab_size": 100, "n_embed": 32, "n_inner": None, "n_layer": 2, "num_attention_heads": 8}
    spec = spec_from_config({**bloom, "architectures": ["BloomForCausalLM"]})
    assert (spec.hidden_size, spec.num_layers, spec.layers[0].attention.num_heads) == (32, 2, 8)
    assert spec.layers[0].mlp.width == 128
    beside = {**bloom, "hidden_size": 64, "architectures": ["BloomForCausalLM"]}
    assert spec_from_config(beside) == spec
    assert spec_from_config({**beside, "n_embed": None}).hidden_size == 64
    mpt = {**MPT, "architectures": ["MPTForCausalLM"]}
    assert spec_from_config(mpt) == spec_of("Mpt")


def test_falcon_in_its_generations() -> None:
    seven = spec_of("Falcon")
    forty = spec_of("Falcon", new_decoder_architecture=True, num_kv_heads=2)
    rw = spec_of("Falcon", alibi=True, multi_query=False, parallel_attn=False, bias=True)
    assert (seven.kv_heads, forty.kv_heads, rw.kv_heads) == (1, 2, 4)
    assert [spec.layers[0].place for spec in (seven, forty, rw)] == [
        NormPlace.PARALLEL,
        NormPlace.PARALLEL_TWO,
        NormPlace.PRE,
    ]
    assert rw.ropes == () and rw.layers[0].params.slopes is not None
    assert (
        spec_of("Falcon", new_decoder_architecture=True, num_ln_in_parallel_attn=1).layers[0].place
        is NormPlace.PARALLEL
    )


def test_scales_and_norms() -> None:
    granite = spec_of("Granite", logits_scaling=8.0, attention_multiplier=0.25, residual_multiplier=0.5)
    assert (granite.logit_scale, granite.layers[0].params.scale, granite.layers[0].branch_scale) == (0.125, 0.25, 0.5)
    assert spec_of("Cohere").logit_scale == 0.0625 and spec_of("Cohere").layers[0].attention.qk_norm is None
    assert spec_of("Cohere", use_qk_norm=True).layers[0].attention.qk_norm is QkNorm.OWN
    assert spec_of("OPT", do_layer_norm_before=False).final_norm is None
    assert spec_of("Mpt", attn_config={"softmax_scale": 0.5}).layers[0].params.scale == 0.5


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Olmo", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("OPT", {"word_embed_proj_dim": 32}, "word_embed_proj_dim beside hidden_size 64: 32"),
        ("Mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi False"),
        ("Mpt", {"attn_config": {"clip_qkv": 6}}, "attn_config.clip_qkv 6"),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("DeepseekV2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("DeepseekV3", {"quantization_config": {"quant_method": "quark"}}, "quant_method 'quark' is not supported"),
        ("DeepseekV3", {"n_group": 3}, "n_group 3 and topk_group 4 of 256 experts, of which a token takes 8"),
        ("Granite", {"residual_multiplier": "half"}, "residual_multiplier is 'half', want a number"),
        ("Llama", {"embedding_multiplier": 12.0}, "embedding_multiplier 12.0"),
    ],
)
def test_refused_by_name(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_of(name, **changes)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Llama", {"rms_norm_eps": "a"}, "rms_norm_eps is 'a', want a number"),
        ("Llama", {"rope_scaling": "linear"}, "rope_scaling is 'linear', want an object"),
        ("Llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\], want an object"),
        ("Llama", {"rope_scaling": {"rope_type": ["linear"]}}, r"rope_type of the rope parameters is \['linear'\]"),
        ("Llama", {"rope_theta": "x"}, "rope_theta is 'x', want a number"),
        ("Llama", {"rope_theta": 0}, "rope_theta is 0, want a number above 0"),
        ("Llama", {"rope_theta": 10**400}, "rope_theta is 10{400}, want a number above 0"),
        ("Llama", {"max_position_embeddings": 10**400}, "max_position_embeddings is 10{400}, want a positive integer"),
        ("Llama", {"rope_parameters": {"rope_theta": "x"}}, "rope_theta of the rope parameters is 'x', want a number"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": "2x"}}, "factor of the rope parameters is '2x', want"),
        ("Llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor of the rope parameters is 0, want"),
        ("Llama", {"rope_scaling": {"type": "yarn", "truncate": "no"}}, "truncate of the rope parameters is 'no'"),
        ("Llama", {"rope_scaling": {"type": "yarn", "mscale": "x"}}, "mscale of the rope parameters is 'x'"),
        (
            "Llama",
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings of the rope parameters is 'x', want a positive integer",
        ),
        ("Phi3", {"original_max_position_embeddings": "x"}, "original_max_position_embeddings is 'x', want a positive"),
        ("Phi3", {"rope_scaling": {**LONG, "long_factor": ["x"] * 8}}, "long_factor of the rope parameters is 'x'"),
        ("Phi3", {"rope_scaling": {**LONG, "long_factor": 2}}, "long_factor of the rope parameters is 2, want a list"),
        ("StableLm", {"partial_rotary_factor": "x"}, "partial_rotary_factor is 'x', want a number"),
        ("StableLm", {"rope_scaling": {"partial_rotary_factor": "x"}}, "partial_rotary_factor of the rope parameters"),
        ("Llama", {"eos_token_id": "x"}, "eos_token_id is 'x', want an integer"),
        ("Llama", {"eos_token_id": [2, None]}, "eos_token_id is None, want an integer"),
        ("SmolLM3", {"no_rope_layers": 5}, "no_rope_layers is 5, want a list"),
        ("SmolLM3", {"no_rope_layers": ["x"] * 6}, "no_rope_layers 'x' is not supported"),
        ("Gemma3", {"layer_types": 7}, "layer_types is 7, want a list"),
        ("Gemma3", {"layer_types": [7] * 6}, "layer_types is 7, want a string"),
        ("Gemma3", {"layer_types": ["full_attention"] * 5}, "layer_types names 5 layers, num_hidden_layers is 6"),
        ("Gemma3", {"rope_local_base_freq": "x"}, "rope_local_base_freq is 'x', want a number"),
        ("Gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, want a number above 0"),
        ("Gemma2", {"final_logit_softcapping": "x"}, "final_logit_softcapping is 'x', want a number"),
        ("Mistral", {"sliding_window": "x"}, "sliding_window is 'x', want a positive integer"),
        ("Qwen3", {"use_sliding_window": "yes"}, "use_sliding_window is 'yes', want true or false"),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": "x"}, "max_window_layers is 'x', want an integer"),
        ("Granite", {"logits_scaling": 0}, "logits_scaling is 0, want a number above 0"),
        ("Llama", {"attention_bias": "yes"}, "attention_bias is 'yes', want true or false"),
        ("Llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, want true or false"),
        ("Llama", {"hidden_act": ["silu"]}, r"hidden_act is \['silu'\], want a string"),
        ("Falcon", {"multi_query": "yes"}, "multi_query is 'yes', want true or false"),
        ("Falcon", {"num_ln_in_parallel_attn": "x"}, "num_ln_in_parallel_attn is 'x', want a positive integer"),
        ("Mpt", {"attn_config": "x"}, "attn_config is 'x', want an object"),
        ("Mpt", {"n_layers": 2, "num_hidden_layers": "x"}, "num_hidden_layers is 'x', want a positive integer"),
        ("Llama", {"architectures": 5}, "architectures is 5, want exactly one name"),
        ("Llama", {"architectures": [["x"]]}, r"architecture \['x'\] is not supported"),
    ],
)
def test_badly_typed_values_are_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_of(name, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 4}}, "'yarn': rope_theta is 1, want another"),
        (
            {
                "max_position_embeddings": 8,
                "rope_scaling": {**LONG, "long_factor": [1.0] * 8, "original_max_position_embeddings": 1},
            },
            "'longrope': original_max_position_embeddings is 1, want more than 1",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 4, "low_freq_factor": 4, "high_freq_factor": 4}},
            "'llama3': high_freq_factor is 4.0, want more than low_freq_factor 4.0",
        ),
        (
            {"head_dim": 8, "partial_rotary_factor": 0.25, "rope_scaling": {"type": "dynamic", "factor": 4}},
            "'dynamic': 2 elements of a head rotate, want more",
        ),
    ],
)
def test_ropes_whose_formula_divides_by_zero_are_refused(changes: dict[str, Any], words: str) -> None:
    name = "Phi3" if "longrope" in words else "StableLm" if "dynamic" in words else "Llama"
    with pytest.raises(UnsupportedModelError, match=words):
        spec_of(name, **changes)


@pytest.mark.parametrize("value", [None, "7", 0, -1.0, float("nan")])
def test_the_limit_of_a_clamped_activation(value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"swiglu_limit is {value!r}, want a number above 0"):
        spec_of("GptOss", swiglu_limit=value)


def test_a_shared_expert_that_ranks_cannot_share() -> None:
    spec = spec_of("Qwen2Moe", moe_intermediate_size=32, shared_expert_intermediate_size=33)
    with pytest.raises(SettingsError, match="--tensor-parallel-size 2 does not divide the shared expert's width 33"):
        spec.check_parallel(2)


SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("n_embd", "n_layer", "n_head", "d_model", "n_layers", "n_heads"),
)


NOT_BY_DEFAULT = {"deepseek_v2": {"num_experts_per_tok": 6}}


@pytest.mark.parametrize(
    ("name", "changes", "mixed"),
    [
        ("DeepseekV3", {"first_k_dense_replace": 2}, [2, 3, 4, 5]),
        ("DeepseekV2", {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 2}, [2, 4]),
        ("Qwen2Moe", {"decoder_sparse_step": 2}, [1, 3, 5]),
        ("Qwen3Moe", {"mlp_only_layers": [0, 4]}, [1, 2, 3, 5]),
    ],
)
def test_layers_with_experts_among_others(name: str, changes: dict[str, Any], mixed: list[int]) -> None:
    layers = spec_of(name, num_hidden_layers=6, **changes).layers
    assert [index for index, layer in enumerate(layers) if isinstance(layer.mlp, Moe)] == mixed


@pytest.mark.parametrize("kind", sorted({tiny.model_type for tiny in TINY_MODELS}))
def test_absent_keys_mean_what_they_mean_to_transformers(kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    needed = NOT_BY_DEFAULT.get(kind, {})
    config = AutoConfig.for_model(kind, **needed)
    architecture = AutoModelForCausalLM._model_mapping[type(config)].__name__
    written = {**config.to_dict(), "architectures": [architecture]}
    sizes = {key: written[key] for key in SIZES if written.get(key) is not None} | needed
    assert spec_from_config({**sizes, "architectures": [architecture]}) == spec_from_config(written)
