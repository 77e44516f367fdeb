"""Models that are no decoders of texts are refused as what they are: all that transformers has, and published files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.config.config_reader import load_spec, spec_from_config
from tandem.workers.models.spec.config.other_kinds import OTHER_KINDS, other_kind
from tandem.workers.models.spec.family_rows.families import FAMILIES

SPEECH, IMAGES, SEEING, PAIRED, ENCODER, JUDGE, *REST = (kind.words for kind in OTHER_KINDS)
TIMES, DRAFT, DIFFUSION, HYBRID, RECURRENT, MORE = REST


def refusal(**config: Any) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        spec_from_config(config)
    assert refused.value.flag == "MODEL"
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("Qwen2VLForConditionalGeneration", {}, "is a vision-language model: Tandem serves text only"),
        (
            "Gemma3ForConditionalGeneration",
            {"vision_config": {}},
            "is a vision-language model: Tandem serves text only",
        ),
        ("LlavaQwenForCausalLM", {"mm_vision_tower": "x"}, "is a vision-language model: Tandem serves text only"),
        ("Phi3VForCausalLM", {"img_processor": {}}, "is a vision-language model: Tandem serves text only"),
        ("SomethingForCausalLM", {"vision_config": {}}, "is a vision-language model: Tandem serves text only"),
        ("CLIPModel", {"vision_config": {}}, "is an encoder of images: Tandem serves text only"),
        (
            "WhisperForConditionalGeneration",
            {"is_encoder_decoder": True},
            "is a model of speech or sound: Tandem serves",
        ),
        ("BertModel", {}, "is an encoder: Tandem serves decoders, which write text"),
        ("XLMRobertaModel", {}, "is an encoder: Tandem serves decoders, which write text"),
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "is an encoder with a decoder: Tandem serves"),
        ("LlamaForSequenceClassification", {}, "is a classifier or a reward model, whose head gives scores: Tandem"),
        ("WhisperForCausalLM", {}, "is a model of speech or sound: Tandem serves text only"),
        ("MambaForCausalLM", {}, RECURRENT),
        ("Mamba2ForCausalLM", {"state_size": 128}, RECURRENT),
        ("FalconMambaForCausalLM", {}, RECURRENT),
        ("RwkvForCausalLM", {}, RECURRENT),
        ("RWKV7ForCausalLM", {}, RECURRENT),
        ("xLSTMForCausalLM", {}, RECURRENT),
        ("GatedDeltaNetForCausalLM", {}, RECURRENT),
        ("SomethingForCausalLM", {"time_step_rank": 4}, RECURRENT),
        ("JambaForCausalLM", {"mamba_d_state": 16}, HYBRID),
        ("BambaForCausalLM", {}, HYBRID),
        ("Zamba2ForCausalLM", {}, HYBRID),
        ("FalconH1ForCausalLM", {}, HYBRID),
        ("NemotronHForCausalLM", {}, HYBRID),
        ("GraniteMoeHybridForCausalLM", {}, HYBRID),
        ("Qwen3NextForCausalLM", {"linear_num_key_heads": 16}, HYBRID),
        ("KimiLinearForCausalLM", {}, HYBRID),
        ("Lfm2MoeForCausalLM", {}, HYBRID),
        ("MiniMaxText01ForCausalLM", {}, HYBRID),
        ("SomethingForCausalLM", {"ssm_state_size": 16}, HYBRID),
        ("LLaDAModelLM", {}, DIFFUSION),
        ("DreamModel", {}, DIFFUSION),
        ("LlamaForCausalLMEagle3", {}, DRAFT),
        ("MedusaModel", {}, DRAFT),
        ("TimeMoeForPrediction", {}, TIMES),
        ("DetrForObjectDetection", {}, IMAGES),
        ("CsmForConditionalGeneration", {}, SPEECH),
        ("Qwen2ForRewardModel", {}, "is a classifier or a reward model, whose head gives scores: Tandem serves"),
    ],
)
def test_what_it_is_and_no_neighbour_is_named(name: str, keys: dict[str, Any], words: str) -> None:
    said = refusal(architectures=[name], vocab_size=10, **keys)
    assert said.startswith(f"MODEL: {name} {words}")


def names_of(*maps: str) -> Iterator[str]:
    from transformers.models.auto import modeling_auto

    for each in maps:
        for value in getattr(modeling_auto, f"MODEL_FOR_{each}_MAPPING_NAMES").values():
            yield from (value,) if isinstance(value, str) else value


def test_what_transformers_has_is_told_apart() -> None:
    """By the names of classes alone: no decoder is taken for another kind, and few others for decoders."""
    served = {family.architecture for family in FAMILIES}
    assert not [name for name in served if other_kind(name, {})]
    of_kinds = {
        ("IMAGE_TEXT_TO_TEXT",): {SEEING, MORE, PAIRED, DIFFUSION},
        ("MASKED_LM",): {ENCODER, PAIRED, MORE},
        ("SEQ_TO_SEQ_CAUSAL_LM",): {PAIRED, SPEECH, MORE},
        ("SPEECH_SEQ_2_SEQ", "CTC"): {SPEECH, MORE},
        ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION"): {JUDGE, ENCODER, PAIRED, SPEECH},
        ("IMAGE_CLASSIFICATION",): {IMAGES},
    }
    for maps, kinds in of_kinds.items():
        found = {name: other_kind(name, {}) for name in names_of(*maps)}
        assert not {name: kind for name, kind in found.items() if kind not in {*kinds, None}}
        assert [*found.values()].count(None) <= len(found) // 20, [name for name in found if found[name] is None]
    decoders = {name for name in names_of("CAUSAL_LM") if name.endswith(("ForCausalLM", "LMHeadModel"))}
    kinds = {name: kind for name in decoders if (kind := other_kind(name, {}))}
    others = {name for name, kind in kinds.items() if kind not in (HYBRID, RECURRENT)}
    assert len(decoders) > 150 and len(others) < 12, others
    assert 18 < len(kinds) - len(others) < 30, "and none of these is near to one that is served"


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("PhiForCausalLM", "Phi3ForCausalLM"),
        ("GPTNeoForCausalLM", "GPTNeoXForCausalLM"),
        ("Olmo3Model", "OlmoForCausalLM"),
        ("CodeGenForCausalLM", None),
        ("ErnieForCausalLM", None),
        ("MvpForCausalLM", None),
        ("DiffLlamaForCausalLM", None),
    ],
)
def test_a_neighbour_has_the_same_first_word(name: str, near: str | None) -> None:
    said = refusal(architectures=[name], vocab_size=10)
    assert f"is not supported; {f'the nearest that is: {near}; ' if near else ''}supported are Llama" in said


def test_a_pipeline_of_diffusers_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="holds a pipeline of diffusers: Tandem serves text only"):
        load_spec(tmp_path)
