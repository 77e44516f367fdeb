"""Says what a model is that is no decoder of texts, or one of another build: by the name of its class and by
config.json's keys. Torch-free.

Called by config_reader.py for architectures that are not supported, so that none of these is told which of the
supported ones is nearest.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class OtherKind:
    """A kind of model. A model is of it whose class has such a name, or whose config.json has one of the keys."""

    words: str  # that follow the name of its class
    names: re.Pattern[str]
    keys: tuple[str, ...] = ()


TEXT_ONLY: Final = "Tandem serves text only"
DECODERS: Final = "Tandem serves decoders, which write text"
ATTENDING: Final = "Tandem serves transformers, whose layers all attend to keys and values"
OTHER_KINDS: Final = (
    OtherKind(
        f"is a model of speech or sound: {TEXT_ONLY}",
        re.compile(
            r"Whisper|Wav2Vec|Hubert|Speech|Seamless|Music|Bark|Vits|ForCTC|Audio|Voxtral|Moshi|Moonshine|A[Ss][Rr](?=For)|"
            r"Transcribe|VibeVoice|^Csm|^Dia(?=For|Model)|TTS|Encodec|^Mimi(?=Model)"
        ),
        ("audio_config", "audio_processor", "audio_token_id", "audio_token_index"),
    ),
    OtherKind(
        f"is an encoder of images: {TEXT_ONLY}",
        re.compile(
            r"CLIP(Model|Vision|Text|$)|Siglip\d*(Model|Vision)|^ViT|Dino|Swin|ResNet|ImageClassification|"
            r"(Object|Keypoint)Detection|Segmentation|DepthEstimation"
        ),
    ),
    OtherKind(
        f"is a vision-language model: {TEXT_ONLY}",
        re.compile(
            r"V[Ll](?![a-z])|[Vv]VForCausalLM|\dV(Moe)?For|MMForCausalLM|Vision|Video|L[Ll]a[Vv]a|Mllama|Idefics|Pixtral|"
            r"Pali[Gg]emma|Florence|Kosmos|Blip|Molmo|MiniCPM[VO]|(Gemma[34]n?|Llama4|Mistral3|Qwen3_5(Moe)?)ForCond|Fuyu|Janus|Emu3|Ovis|Omni|SmolVLM|O[Cc][Rr]\d?(?=For)"
        ),
        (
            *("vision_config", "visual", "vision_tower", "mm_vision_tower", "vision_encoder", "img_processor"),
            *("image_token_id", "image_token_index"),
        ),
    ),
    OtherKind(
        f"is an encoder with a decoder: {DECODERS}",
        re.compile(
            r"^(M|UM|Long|By)?T5(?!.*CausalLM)|(Bart|Pegasus|Marian|^LED|ProphetNet|M2M100|Blenderbot|Nllb|FSMT|"
            r"SwitchTransformers|EncoderDecoder).*(ForConditionalGeneration|Classification|Model)$"
        ),
    ),
    OtherKind(
        f"is an encoder: {DECODERS}",
        re.compile(
            r"([Bb]ert|^MPNet|^Electra|^Funnel|formerFor|BigBird|^Canine|^Luke|^XLM)(?!.*(CausalLM|LMHeadModel)$)|MaskedLM$"
        ),
    ),
    OtherKind(
        f"is a classifier or a reward model, whose head gives scores: {DECODERS}",
        re.compile(r"(Sequence|Token)Classification$|QuestionAnswering$|Reward|ForScore|Rerank"),
    ),
    OtherKind(
        f"is a model of time series: {TEXT_ONLY}", re.compile(r"ForPrediction$|TimeSeries|^TimesFm|^PatchTS|Autoformer")
    ),
    OtherKind(
        "is a draft for another model, with which it shares layers: serve that model, with --speculative-config",
        re.compile(r"Eagle|Medusa|Speculator"),
    ),
    OtherKind(
        "is a diffusion model, which writes its text everywhere at once: Tandem serves decoders, which write one token "
        "behind the other",
        re.compile(r"L[Ll]a[Dd][Aa]|^Dream(?=Model|For)|^SDAR|Diffu|MDLM"),
    ),
    OtherKind(
        f"has layers of a state space, of linear attention or of convolutions: {ATTENDING}",
        re.compile(
            r"^(Jamba|Zamba|Bamba|FalconH\d|Hymba|Samba|Plamo2|RecurrentGemma|Griffin|Lfm\d|KimiLinear|Qwen3_5|"
            r"MiniMax(Text01)?For|MiniMaxM1|Phi4Flash|StripedHyena)|Nemotron_?H(?![a-z])|Hybrid|Qwen\d+Next"
        ),
        (
            *("ssm_state_size", "mamba_d_state", "mamba_d_conv", "mamba_num_heads", "lru_width", "conv_L_cache"),
            *("linear_attn_config", "linear_conv_kernel_dim", "linear_num_key_heads", "attn_layer_period"),
        ),
    ),
    OtherKind(
        f"is a state space model or another recurrent network: {ATTENDING}",
        re.compile(r"[Mm]amba|[Rr][Ww][Kk][Vv]|xLSTM|^RetNet|Hyena|DeltaNet|^S4|^GLA(?=For)|HGRN|LSTM"),
        ("ssm_cfg", "state_size", "time_step_rank"),
    ),
    OtherKind(f"reads more than text, or has an encoder: {DECODERS}", re.compile(r"ForConditionalGeneration$")),
)
"""Kinds that are not served; the first that fits is what a model is."""


def other_kind(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Returns what a model is that is known to be no decoder of texts: words that follow the name of its class."""
    for kind in OTHER_KINDS:
        if kind.names.search(architecture) or any(config.get(key) is not None for key in kind.keys):
            return kind.words
    return None
