"""config.json that says one thing in two ways: what counts is what counts to transformers, or it is refused by name."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tests.support.tiny_models import TINY_MODELS

BASE: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
TRAINED = {"original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 16.0, **TRAINED},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **TRAINED}
NEW = {"rope_type": "default", "rope_theta": 10000.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def read_by(kind: str, config: dict[str, Any]) -> tuple[ArchSpec, dict[str, Any]]:
    """The spec of what transformers makes of a config.json, and the file with its architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    found = AutoConfig.for_model(kind, **copy.deepcopy(config))
    architectures = [AutoModelForCausalLM._model_mapping[type(found)].__name__]
    return spec_from_config({**found.to_dict(), "architectures": architectures}), {
        **config, "architectures": architectures
    }  # fmt: skip


def check_equal(kind: str, config: dict[str, Any]) -> ArchSpec:
    theirs, file = read_by(kind, config)
    ours = spec_from_config(file)
    assert replace(ours, remarks=()) == theirs
    return ours


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rope_scaling_counts_beside_rope_parameters(scaling: str, spelling: str) -> None:
    older = {spelling: scaling, **SCALINGS[scaling]}
    ours = check_equal("llama", {**BASE, "rope_parameters": NEW, "rope_scaling": older})
    assert ours.ropes[0].kind == scaling
    assert ours.max_position_embeddings == {"linear": 2048, "dynamic": 1024}.get(scaling, 512), "the context follows"
    assert ours.remarks == (
        "config.json has rope_scaling beside rope_parameters: it takes its place, as in transformers",
    )


def ropes_given_twice() -> Iterator[tuple[str, dict[str, Any]]]:
    """(model type, keys): thetas on both levels, partial rotation, layers of two kinds, empty and equal dicts."""
    linear, yarn = {"type": "linear", **SCALINGS["linear"]}, {"rope_type": "yarn", **SCALINGS["yarn"]}
    for kind in ("qwen2", "qwen3", "smollm3", "cohere", "mixtral", "deepseek_v3", "gpt_oss", "olmo2", "falcon"):
        yield kind, {"rope_parameters": {**NEW, "rope_theta": 7.0}, "rope_scaling": {**linear, "rope_theta": 5e5}}
        yield kind, {"rope_parameters": {"rope_type": "default"}, "rope_scaling": linear, "rope_theta": 9.0}
    yield "llama", {"rope_parameters": {**NEW, "rope_theta": 7.0}, "rope_theta": 9.0}
    yield "llama", {"rope_parameters": {**NEW, "rope_theta": 7.0}, "rope_scaling": None}
    yield "llama", {"rope_parameters": {**NEW, "rope_theta": 7.0}, "rope_scaling": {}}
    yield "llama", {"rope_parameters": {**yarn, "factor": 2.0, "rope_theta": 10000.0}, "rope_scaling": yarn}
    yield "llama", {"rope_parameters": None, "rope_scaling": yarn, "rope_theta": 9.0}
    yield "llama", {"rope_parameters": NEW, "rope_scaling": {"rope_type": "default", "type": "linear", "factor": 4.0}}
    yield "stablelm", {"rope_parameters": {**NEW, "partial_rotary_factor": 0.25}, "rope_scaling": linear}
    yield "stablelm", {"rope_parameters": NEW, "rope_scaling": {**linear, "partial_rotary_factor": 0.5}}
    yield "stablelm", {"rope_parameters": NEW, "rope_scaling": linear, "partial_rotary_factor": 0.5}
    yield "gpt_neox", {"rope_parameters": NEW, "rope_scaling": linear, "rotary_pct": 0.5}
    yield "phi3", {"rope_parameters": NEW, "rope_scaling": {"type": "longrope", **LONG}, **TRAINED, "pad_token_id": 0}
    layers = {FULL: {**NEW, "rope_theta": 5e5}, SLIDING: {**NEW, "rope_theta": 7e3}}
    gemma = {"layer_types": [SLIDING, FULL], "sliding_window": 64, "head_dim": 16}
    yield "gemma3_text", {**gemma, "rope_parameters": layers}
    yield "gemma3_text", {**gemma, "rope_parameters": layers, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    own = {"rope_theta": 9.0, "rope_local_base_freq": 8.0}
    yield "gemma3_text", {**gemma, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, **own}
    yield "gemma3_text", {**gemma, "rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: NEW}, "rope_scaling": linear}


@pytest.mark.parametrize(("kind", "keys"), list(ropes_given_twice()), ids=str)
def test_ropes_given_twice_are_those_of_transformers(kind: str, keys: dict[str, Any]) -> None:
    check_equal(kind, {**BASE, **keys})


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        (
            "Qwen3",
            {"rope_parameters": {**NEW, "rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_scaling takes the place of rope_parameters in transformers, whose rope_theta 1000000.0 becomes "
            "10000.0 by that; say rope_theta in rope_scaling too",
        ),
        (
            "StableLm",
            {
                "rope_parameters": {**NEW, "partial_rotary_factor": 0.5},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "whose partial_rotary_factor 0.5 becomes 0.25 by that; say partial_rotary_factor in rope_scaling too",
        ),
        (
            "Gemma3",
            {"rope_parameters": {FULL: NEW, SLIDING: NEW}, "rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope_scaling has the type 'linear', which does not count in transformers beside the rope_type 'default'",
        ),
        ("Gemma3", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "of these layers; write it as rope_type"),
        ("Gemma3", {"rope_parameters": NEW}, "rope_parameters is not one of full_attention and sliding_attention"),
        ("Gemma3", {"rope_scaling": {FULL: NEW}}, "rope_scaling has no kinds of layers; rope_parameters has"),
    ],
)
def test_where_transformers_would_lose_a_number_it_is_refused(name: str, keys: dict[str, Any], words: str) -> None:
    config = {**BASE, "architectures": [f"{name}ForCausalLM"], **keys}
    with pytest.raises(UnsupportedModelError, match=words):
        spec_from_config(config)
    given = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    wide = spec_from_config(config, {"rope_scaling": given}) if name == "Qwen3" else None
    assert wide is None or (wide.ropes[0].theta, wide.remarks) == (5.0, ()), "what the user gives is clear"


def test_what_the_user_scales_keeps_the_files_theta() -> None:
    file = {**BASE, "architectures": ["Qwen3ForCausalLM"], "rope_parameters": {**NEW, "rope_theta": 1e6}}
    for older in ({"type": "linear", "factor": 2.0}, None):
        spec = spec_from_config({**file, "rope_scaling": older}, {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
        assert (spec.ropes[0].theta, spec.ropes[0].kind) == (1e6, "dynamic")


@pytest.mark.parametrize("kind", sorted({tiny.model_type for tiny in TINY_MODELS}))
def test_both_names_of_a_key_are_read_as_transformers_reads_them(kind: str) -> None:
    """Its attribute_map has the names that mean another; each has twice the value of the key that it stands for."""
    from transformers import AutoConfig

    plain = AutoConfig.for_model(kind, **({"num_experts_per_tok": 2} if kind == "deepseek_v2" else {}))
    written = {key: value for key, value in plain.to_dict().items() if value is not None and key != "model_type"}
    for alias, key in type(plain).attribute_map.items():
        own, others = written[key], {name: value for name, value in written.items() if name != key}
        check_equal(kind, {**written, alias: 2 * own})
        assert check_equal(kind, {**others, alias: 2 * own}) == check_equal(kind, {**others, key: 2 * own}), alias
