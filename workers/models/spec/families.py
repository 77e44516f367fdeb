"""The registry of model families: Llama and its kin as rows of data; the others are in gpt_families.py. Torch-free."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tandem.configs.errors import UnsupportedModelError
from tandem.workers.models.spec.arch import ArchSpec, NormKind, Place, QkNorm, Scoring
from tandem.workers.models.spec.family import Family, GroupKeys, MoeKeys, Rotary, Scales, Window
from tandem.workers.models.spec.gpt_families import GPT_FAMILIES
from tandem.workers.models.spec.parameter_names import FusedQkv, ParameterNames, Role
from tandem.workers.models.spec.parameters import ParameterTable, parameters


def stems(**changes: str) -> Mapping[Role, str]:
    """Llama's names with others for some roles."""
    return MappingProxyType({**ParameterNames().stems, **{Role[role]: stem for role, stem in changes.items()}})


GEMMA2_STEMS = stems(
    ATTENTION_POST_NORM="post_attention_layernorm",
    MLP_NORM="pre_feedforward_layernorm",
    MLP_POST_NORM="post_feedforward_layernorm",
)
QWEN_MOE_STEMS = stems(
    ROUTER="mlp.gate", SHARED_GATE="mlp.shared_expert_gate", GATE="gate_proj", UP="up_proj", DOWN="down_proj"
)
QWEN_MOE_NAMES = ParameterNames(stems=QWEN_MOE_STEMS, mlp_prefix="mlp.")
DEEPSEEK_NAMES = ParameterNames(
    stems=stems(
        Q_A="self_attn.q_a_proj",
        Q_A_NORM="self_attn.q_a_layernorm",
        Q_B="self_attn.q_b_proj",
        KV_A="self_attn.kv_a_proj_with_mqa",
        KV_A_NORM="self_attn.kv_a_layernorm",
        KV_B="self_attn.kv_b_proj",
        ROUTER="mlp.gate",
        ROUTER_CORRECTION="mlp.gate",
        GATE="gate_proj",
        UP="up_proj",
        DOWN="down_proj",
    ),
    mlp_prefix="mlp.",
    shared_prefix="mlp.shared_experts.",
)
DEEPSEEK_KEYS = MoeKeys(
    num_experts="n_routed_experts",
    top_k="num_experts_per_tok",
    width="moe_intermediate_size",
    renormalize=False,
    shared_count="n_shared_experts",
    scale="routed_scaling_factor",
    groups=GroupKeys(count="n_group", taken="topk_group", best=1),
    grouped_if=("topk_method", "group_limited_greedy"),
    first="first_k_dense_replace",
    every="moe_layer_freq",
)
GRANITE_SCALES = Scales(
    embeddings="embedding_multiplier",
    branches="residual_multiplier",
    scores="attention_multiplier",
    logits_divisor="logits_scaling",
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
        architecture="MinistralForCausalLM",
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
        qk_norm=QkNorm.PER_HEAD,
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
        architecture="Phi3ForCausalLM",
        window=Window.ALWAYS,
        rotary=Rotary(share="partial_rotary_factor", kinds={"su": "longrope", "yarn": "longrope"}),
        names=ParameterNames(
            stems=stems(QKV="self_attn.qkv_proj", GATE_UP="mlp.gate_up_proj"), fused_qkv=FusedQkv.IN_TURN
        ),
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 32000,
        },
        neutral={"attention_bias": (None, False), "mlp_bias": (None, False)},
    ),
    Family(
        architecture="GraniteForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        scales=GRANITE_SCALES,
        defaults={
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="OlmoForCausalLM",
        keys={"norm_eps": "layer_norm_eps"},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        norm=NormKind.LAYER,
        norm_weight=False,
        defaults={"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=QkNorm.WHOLE,
        place=Place.POST,
        names=ParameterNames(
            stems=stems(ATTENTION_POST_NORM="post_attention_layernorm", MLP_POST_NORM="post_feedforward_layernorm")
        ),
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279},
    ),
    Family(
        architecture="StableLmForCausalLM",
        keys={"norm_eps": "layer_norm_eps"},
        qkv_bias="use_qkv_bias",
        qk_norm=QkNorm.OWN,
        qk_norm_if="qk_layernorm",
        norm=NormKind.LAYER,
        place_if=((("use_parallel_residual", True), Place.PARALLEL),),
        rotary=Rotary(share="partial_rotary_factor", default_share=0.25),
        names=ParameterNames(
            stems=stems(Q_NORM="self_attn.q_layernorm", K_NORM="self_attn.k_layernorm"), norm_of_head="norms.{head}"
        ),
        defaults={"max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0},
    ),
    Family(
        architecture="CohereForCausalLM",
        keys={"norm_eps": "layer_norm_eps"},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=QkNorm.OWN,
        qk_norm_if="use_qk_norm",
        norm=NormKind.LAYER,
        norm_bias=False,
        place=Place.PARALLEL,
        rotary=Rotary(interleaved=True),
        scales=Scales(logits="logit_scale"),
        names=ParameterNames(),
        defaults={
            "max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "tie_word_embeddings": True,
            "bos_token_id": 5,
            "eos_token_id": 255001,
        },
        also={"max_position_embeddings": ("model_max_length",)},
    ),
    Family(
        architecture="GemmaForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        activations={"gelu": "gelu_pytorch_tanh"},  # their first checkpoints mean the approximation
        norms_store_offset=True,
        scales_embeddings=True,
        defaults={
            "max_position_embeddings": 8192,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
        neutral={"hidden_activation": (None, "gelu_pytorch_tanh")},
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
        architecture="Gemma3ForCausalLM",
        keys={"activation": "hidden_activation"},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=QkNorm.PER_HEAD,
        norms_store_offset=True,
        place=Place.SANDWICH,
        scales_embeddings=True,
        score_scale="query_pre_attn_scalar",
        window=Window.PATTERN,
        rotary=Rotary(local_theta=("rope_local_base_freq", 10000.0), positions_scaled=True),
        names=ParameterNames(stems=GEMMA2_STEMS),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1000000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 1,
        },
    ),
    Family(
        architecture="MixtralForCausalLM",
        window=Window.ALWAYS,
        moe=MoeKeys(num_experts="num_local_experts", top_k="num_experts_per_tok"),
        names=ParameterNames(
            stems=stems(ROUTER="block_sparse_moe.gate", GATE="w1", UP="w3", DOWN="w2"),
            expert_prefix="block_sparse_moe.experts.{expert}.",
        ),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias="qkv_bias",
        moe=MoeKeys(
            num_experts="num_experts",
            top_k="num_experts_per_tok",
            width="moe_intermediate_size",
            renormalize="norm_topk_prob",
            shared="shared_expert_intermediate_size",
            every="decoder_sparse_step",
            counts_from_one=True,
            dense="mlp_only_layers",
        ),
        names=QWEN_MOE_NAMES,
        defaults={
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        neutral={"use_sliding_window": (None, False)},
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=QkNorm.PER_HEAD,
        moe=MoeKeys(
            num_experts="num_local_experts",
            top_k="num_experts_per_tok",
            width="moe_intermediate_size",
            renormalize="norm_topk_prob",
            every="decoder_sparse_step",
            counts_from_one=True,
            dense="mlp_only_layers",
        ),
        names=QWEN_MOE_NAMES,
        defaults={
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        neutral={"use_sliding_window": (None, False)},
        also={"num_local_experts": ("num_experts",)},
    ),
    Family(
        architecture="GraniteMoeForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        moe=MoeKeys(num_experts="num_local_experts", top_k="num_experts_per_tok"),
        scales=GRANITE_SCALES,
        names=ParameterNames(
            stems=stems(
                ROUTER="block_sparse_moe.router.layer",
                GATE_UP="block_sparse_moe.input_linear",
                DOWN="block_sparse_moe.output_linear",
            ),
            expert_prefix="block_sparse_moe.experts.{expert}.",
            stacked_experts=True,
        ),
        defaults={
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="DeepseekV2ForCausalLM",
        qkv_bias="attention_bias",
        latent=True,
        rotary=Rotary(interleaved=True),
        moe=DEEPSEEK_KEYS,
        names=DEEPSEEK_NAMES,
        defaults={
            "max_position_embeddings": 2048,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        neutral={
            "topk_method": (None, "greedy", "group_limited_greedy"),
            "scoring_func": (None, "softmax"),
            "norm_topk_prob": (None, False),
            "mlp_bias": (None, False),
        },
        equal={"num_key_value_heads": "num_attention_heads"},
    ),
    Family(
        architecture="DeepseekV3ForCausalLM",
        qkv_bias="attention_bias",
        latent=True,
        extra_layers="num_nextn_predict_layers",
        rotary=Rotary(interleaved="rope_interleave"),
        moe=replace(
            DEEPSEEK_KEYS,
            renormalize="norm_topk_prob",
            scoring=Scoring.SIGMOID,
            correction=True,
            groups=GroupKeys(count="n_group", taken="topk_group", best=2),
            grouped_if=None,
        ),
        names=DEEPSEEK_NAMES,
        defaults={
            "max_position_embeddings": 4096,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 1,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        neutral={"topk_method": (None, "noaux_tc"), "scoring_func": (None, "sigmoid")},
        equal={"num_key_value_heads": "num_attention_heads"},
    ),
    Family(
        architecture="GptOssForCausalLM",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        sinks=True,
        window=Window.ALTERNATING,
        rotary=Rotary(
            positions_scaled=True,
            scaling={
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        ),
        moe=MoeKeys(
            num_experts="num_local_experts",
            top_k="num_experts_per_tok",
            scoring=Scoring.TOP_SOFTMAX,
            biased=True,
            swiglu=("swiglu_alpha", "swiglu_limit"),
        ),
        names=ParameterNames(
            stems=stems(ROUTER="mlp.router", GATE_UP="mlp.experts.gate_up_proj", DOWN="mlp.experts.down_proj"),
            interleaved_experts=True,
        ),
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
    *GPT_FAMILIES,
)


def supported_architectures() -> tuple[str, ...]:
    """Returns the names of all families."""
    return tuple(family.architecture for family in FAMILIES)


def family_of(architecture: str) -> Family:
    """The row of an architecture. Raises UnsupportedModelError with the supported list."""
    for family in FAMILIES:
        if architecture in (family.architecture, *family.aliases):
            return family
    raise UnsupportedModelError(
        f"architecture {architecture!r} is not supported; supported: {', '.join(supported_architectures())}", "MODEL"
    )


def parameters_of(spec: ArchSpec) -> ParameterTable:
    """Returns the table of a model's parameters, under its family's names."""
    return parameters(spec, family_of(spec.architecture).names)
