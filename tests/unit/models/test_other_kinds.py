"""Models that are no decoders of texts are refused as what they are: all that transformers has, and published files."""

from collections.abc import Iterator
from typing import Any

import pytest

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.config.config_reader import spec_from_config
from tandem.workers.models.spec.config.other_kinds import OTHER_KINDS, other_kind
from tandem.workers.models.spec.family_rows.families import FAMILIES

SPEECH, IMAGES, SEEING, PAIRED, ENCODER, JUDGE, MORE = (kind.words for kind in OTHER_KINDS)


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
        ("IMAGE_TEXT_TO_TEXT",): {SEEING, MORE, PAIRED},
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
    others = {name for name in decoders if other_kind(name, {})}
    assert len(decoders) > 150 and len(others) < 12, others
