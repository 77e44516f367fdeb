"""config.json to ArchSpec: both spellings, defaults, overrides, and refusals by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec, RopeKind, RopeSpec
from tandem.workers.models.spec.config.config_reader import load_spec, spec_from_config
from tandem.workers.models.spec.family_rows.families import FAMILIES, parameters_of
from tandem.workers.models.spec.kv_layout import kv_layout

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [architecture], **changes}


def rope(spec: ArchSpec) -> RopeSpec:
    """The rotary positions that all rotating layers share."""
    [found] = {layer.position for layer in spec.layers if layer.position is not None}
    return found


def windows_of(spec: ArchSpec) -> tuple[int | None, ...]:
    return tuple(layer.params.window for layer in spec.layers)


def test_classic_and_new_keys_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    classic = config(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    assert spec_from_config(classic) == spec_from_config(new)
    assert rope(spec_from_config(new)).kind is RopeKind.LLAMA3
    assert spec_from_config(new).torch_dtype == "bfloat16"


def test_absent_keys_take_the_family_defaults_and_null_means_none() -> None:
    spec = spec_from_config(config("MistralForCausalLM", eos_token_id=[2, 7]))
    assert windows_of(spec) == (4096,) * 4
    assert spec.eos_token_ids == (2, 7)
    assert windows_of(spec_from_config(config("MistralForCausalLM", sliding_window=None))) == (None,) * 4
    assert spec_from_config(config("Qwen3ForCausalLM")).head_dim == 128
    assert spec_from_config(config("Qwen3ForCausalLM", head_dim=None)).head_dim == 8
    assert rope(spec_from_config(config("SmolLM3ForCausalLM"))).theta == 2e6
    assert spec_from_config(config(num_key_value_heads=None)).kv_heads == 8


def test_windows_by_layer() -> None:
    def windows(**changes: Any) -> tuple[int | None, ...]:
        return windows_of(spec_from_config(config("Qwen2ForCausalLM", sliding_window=9, **changes)))

    assert windows() == (None,) * 4
    assert windows(use_sliding_window=True, max_window_layers=3) == (None, None, None, 9)
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows(use_sliding_window=True, layer_types=kinds) == (9, None, 9, None)
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        windows(use_sliding_window=True, layer_types=["chunked_attention"] * 4)


def test_context_grows_with_the_scaling() -> None:
    def positions(**scaling: Any) -> int:
        return spec_from_config(config(max_position_embeddings=100, rope_scaling=scaling)).max_position_embeddings

    assert positions(rope_type="linear", factor=4) == 400
    assert positions(rope_type="dynamic", factor=2.5) == 250
    assert positions(rope_type="yarn", factor=4.0, original_max_position_embeddings=50) == 200
    assert positions(type="yarn", factor=4.0) == 400


def test_overrides_win_over_aliases_in_the_file(tmp_path: Path) -> None:
    file = config(dtype="bfloat16", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    (tmp_path / "config.json").write_text(json.dumps(file))
    spec = load_spec(tmp_path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "float32"})
    assert rope(spec).kind is RopeKind.LINEAR
    assert spec.torch_dtype == "float32"
    assert rope(load_spec(tmp_path, {"rope_theta": 7.0})).theta == 7.0
    assert rope(load_spec(tmp_path)).theta == 5.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["Cohere2ForCausalLM"]},
            "'Cohere2ForCausalLM' is not supported; the nearest that is: CohereForCausalLM; supported are Llama, ",
        ),
        ({"architectures": ["X"]}, "'X' is not supported; supported are Llama, Mistral, .*, GPT2, Bloom, .*, Mpt"),
        (
            {"architectures": []},
            r"config.json has no architectures: a list with the name .*; supported are Llama, Mistral",
        ),
        ({"architectures": None}, "config.json has no architectures: a list with the name"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported; supported: silu"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope type 'proportional'"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 4}}, "needs 'short_factor'"),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 3, "short_factor": [1.0] * 4}},
            "long_factor of the rope parameters is 3 numbers, want 4",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs 'factor'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": "big"}, "vocab_size is 'big'"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config({**LLAMA, **changes})


def test_unreadable_folders(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"holds no config\.json: it is no folder of a model"):
        load_spec(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SettingsError, match=r"holds no \.safetensors file, but GGUF \(model\.gguf\)"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SettingsError, match="not JSON"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(SettingsError, match="not JSON"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "words"),
    [
        (3, 1, "--tensor-parallel-size 3 does not divide the model's 8 attention heads; possible: 1, 2, 4, 8"),
        (1, 5, "--pipeline-parallel-size 5 is outside 1..4"),
    ],
)
def test_impossible_degrees_name_the_flag(tp_size: int, pp_size: int, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as caught:
        spec_from_config(LLAMA).check_parallel(tp_size, pp_size)
    assert caught.value.flag is not None and words.startswith(caught.value.flag)


def test_shards_of_kv_heads_and_mlp() -> None:
    spec = spec_from_config(config(num_attention_heads=12, num_key_value_heads=3, head_dim=6, intermediate_size=90))
    with pytest.raises(SettingsError, match="3 KV heads"):
        spec.check_parallel(2)
    with pytest.raises(SettingsError, match="MLP width 90"):
        spec.check_parallel(12)
    spec.check_parallel(6)
    assert [kv_layout(spec.layers[0], tp).planes[0].heads for tp in (1, 3, 6)] == [3, 1, 1]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_counted_parameters_are_those_of_the_checkpoint(family: Any, tmp_path: Path) -> None:
    """num_parameters and the tensor names agree with a checkpoint that transformers wrote."""
    from safetensors import safe_open

    from tests.support.tiny_models import TINY_MODELS, save_tiny_model

    kind = family.architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel").lower()
    tiny = next(model for model in TINY_MODELS if model.model_type.replace("_", "").removesuffix("text") == kind)
    folder = save_tiny_model(tiny, tmp_path)
    spec = load_spec(folder)
    table = parameters_of(spec)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        elements = sum(file.get_tensor(name).numel() for name in names)
    stored = {name for param in table for name in param.source.names}
    assert names <= stored and all(names & set(param.source.names) for param in table)
    assert table.num_elements == elements


@pytest.mark.parametrize(
    ("name", "down"),
    [
        ("gpt_oss", "mlp.experts.1.down_proj"),
        ("granitemoe", "block_sparse_moe.experts.1.output_linear"),
        ("mixtral", "block_sparse_moe.experts.1.w2"),
    ],
)
def test_an_experts_name_says_its_path_once(name: str, down: str, tmp_path: Path) -> None:
    """Also where one tensor, whose stem is a path within the layer, has the matrices of all experts."""
    from tests.support.tiny_models import BY_NAME, save_tiny_model

    table = parameters_of(load_spec(save_tiny_model(BY_NAME[name], tmp_path)))
    assert f"model.layers.0.{down}.weight" in [param.name for param in table.layers[0].experts[1]]
