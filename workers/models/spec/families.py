"""Model families as rows of data: where an architecture's config.json and checkpoint have what ArchSpec needs.

config_reader.py reads config.json by a row, parameters.py names parameters by it. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec, NormKind, Place
from tandem.workers.models.spec.parameters import FusedQkv, ParameterNames, ParameterTable, Role, parameters


class Window(Enum):
    """The condition under which a family's `sliding_window` applies."""

    NEVER = "never"
    ALWAYS = "always"
    IF_USED = "if_used"  # with `use_sliding_window`, on the layers that `layer_types` or `max_window_layers` name
    ALTERNATING = "alternating"  # on every other layer from the first on, or where `layer_types` says


class PositionKind(Enum):
    """How a family tells tokens their positions."""

    ROTARY = "rotary"
    LEARNED = "learned"  # a table that is added to the embeddings
    ALIBI = "alibi"  # a bias on the scores


@dataclass(frozen=True, slots=True)
class MoeKeys:
    """config.json's keys of a mixture of experts."""

    num_experts: str
    top_k: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. A bias is True, False, or the config key that sets it.

    keys: config.json's names of what LLAMA_KEYS lists, where they differ. defaults: the values of absent keys, by
    config.json's names. gated: the MLP has a gate. moe: its MLPs are the
    experts of a mixture. norms_store_offset: see Norm. scales_embeddings: by the square root
    of the hidden size. score_scale: the key of the number whose inverse square root scales scores, None: head_dim.
    softcaps: whether attn_logit_softcapping and final_logit_softcapping apply. neutral: further keys that are accepted
    with these values only.
    """

    architecture: str
    keys: Mapping[str, str] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    norm: NormKind = NormKind.RMS
    norms_store_offset: bool = False
    place: Place = Place.PRE
    gated: bool = True
    moe: MoeKeys | None = None
    positions: PositionKind = PositionKind.ROTARY
    embedding_norm: bool = False
    scales_embeddings: bool = False
    score_scale: str | None = None
    softcaps: bool = False
    window: Window = Window.NEVER
    has_no_rope_layers: bool = False
    names: ParameterNames = field(default_factory=ParameterNames)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


GEMMA2_STEMS: Mapping[Role, str] = MappingProxyType(
    {
        **ParameterNames().stems,
        Role.ATTENTION_POST_NORM: "post_attention_layernorm",
        Role.MLP_NORM: "pre_feedforward_layernorm",
        Role.MLP_POST_NORM: "post_feedforward_layernorm",
    }
)
MIXTRAL_STEMS: Mapping[Role, str] = MappingProxyType(
    {
        **ParameterNames().stems,
        Role.ROUTER: "block_sparse_moe.gate",
        Role.GATE: "w1",
        Role.UP: "w3",
        Role.DOWN: "w2",
    }
)
GPT2_NAMES = ParameterNames(
    stems=MappingProxyType(
        {
            Role.EMBEDDING: "transformer.wte",
            Role.POSITIONS: "transformer.wpe",
            Role.ATTENTION_NORM: "ln_1",
            Role.QKV: "attn.c_attn",
            Role.O: "attn.c_proj",
            Role.MLP_NORM: "ln_2",
            Role.UP: "mlp.c_fc",
            Role.DOWN: "mlp.c_proj",
            Role.FINAL_NORM: "transformer.ln_f",
            Role.HEAD: "lm_head",
        }
    ),
    layer_prefix="transformer.h.{layer}.",
    base_prefix="transformer.",
    fused_qkv=FusedQkv.IN_TURN,
    transposed=True,
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
)
BLOOM_NAMES = ParameterNames(
    stems=MappingProxyType(
        {
            Role.EMBEDDING: "transformer.word_embeddings",
            Role.EMBEDDING_NORM: "transformer.word_embeddings_layernorm",
            Role.ATTENTION_NORM: "input_layernorm",
            Role.QKV: "self_attention.query_key_value",
            Role.O: "self_attention.dense",
            Role.MLP_NORM: "post_attention_layernorm",
            Role.UP: "mlp.dense_h_to_4h",
            Role.DOWN: "mlp.dense_4h_to_h",
            Role.FINAL_NORM: "transformer.ln_f",
            Role.HEAD: "lm_head",
        }
    ),
    layer_prefix="transformer.h.{layer}.",
    base_prefix="transformer.",
    fused_qkv=FusedQkv.BY_HEAD,
    ignored_suffixes=(),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="LlamaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    ),
    Family(
        architecture="MistralForCausalLM",
        window=Window.ALWAYS,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        window=Window.IF_USED,
        defaults={"max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window=Window.IF_USED,
        defaults={"max_position_embeddings": 32768, "head_dim": 128, "sliding_window": 4096},
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        window=Window.IF_USED,
        has_no_rope_layers=True,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
        },
    ),
    Family(
        architecture="MixtralForCausalLM",
        window=Window.ALWAYS,
        moe=MoeKeys("num_local_experts", "num_experts_per_tok"),
        names=ParameterNames(stems=MIXTRAL_STEMS, expert_prefix="block_sparse_moe.experts.{expert}."),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="Gemma2ForCausalLM",
        keys={"activation": "hidden_activation"},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norms_store_offset=True,
        place=Place.SANDWICH,
        scales_embeddings=True,
        score_scale="query_pre_attn_scalar",
        softcaps=True,
        window=Window.ALTERNATING,
        names=ParameterNames(stems=GEMMA2_STEMS),
        defaults={
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
    Family(
        architecture="GPT2LMHeadModel",
        keys={
            "hidden_size": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "num_kv_heads": "n_head",
            "mlp_width": "n_inner",
            "context": "n_positions",
            "activation": "activation_function",
            "norm_eps": "layer_norm_epsilon",
        },
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm=NormKind.LAYER,
        gated=False,
        positions=PositionKind.LEARNED,
        names=GPT2_NAMES,
        defaults={
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 50256,
            "eos_token_id": 50256,
        },
        neutral={
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "reorder_and_upcast_attn": (None, False),
            "add_cross_attention": (None, False),
        },
    ),
    Family(
        architecture="BloomForCausalLM",
        keys={
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "num_kv_heads": "n_head",
            "mlp_width": "n_inner",
            "context": "seq_length",
            "norm_eps": "layer_norm_epsilon",
        },
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm=NormKind.LAYER,
        gated=False,
        positions=PositionKind.ALIBI,
        embedding_norm=True,
        names=BLOOM_NAMES,
        defaults={
            "seq_length": 2048,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        neutral={"apply_residual_connection_post_layernorm": (None, False)},
    ),
)


def supported_architectures() -> tuple[str, ...]:
    """Returns the names of all families."""
    return tuple(family.architecture for family in FAMILIES)


def family_of(architecture: str) -> Family:
    """The row of an architecture. Raises UnsupportedModelError with the supported list."""
    for family in FAMILIES:
        if family.architecture == architecture:
            return family
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported; supported: {', '.join(supported_architectures())}", "MODEL"
    )


def parameters_of(spec: ArchSpec) -> ParameterTable:
    """Returns the table of a model's parameters, under its family's names."""
    return parameters(spec, family_of(spec.architecture).names)
