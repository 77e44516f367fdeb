"""GPT and its kin as rows of data: decoders whose MLP has no gate, with LayerNorm and mostly biases. Torch-free."""

from collections.abc import Mapping
from types import MappingProxyType

from tandem.workers.models.spec.arch import NormKind, NormPlace
from tandem.workers.models.spec.family import Family, PositionKind, Rotary, Scales, Window
from tandem.workers.models.spec.parameter_names import FusedQkv, ParameterNames, Role

GPT2_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "num_kv_heads": "n_head",
        "mlp_width": "n_inner",
        "context": "n_positions",
        "activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    }
)
GPT2_ALSO: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "n_embd": ("hidden_size",),
        "n_layer": ("num_hidden_layers",),
        "n_head": ("num_attention_heads",),
        "n_positions": ("max_position_embeddings",),
    }
)
"""transformers' attribute_map."""
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
NEOX_NAMES = ParameterNames(
    stems=MappingProxyType(
        {
            Role.EMBEDDING: "gpt_neox.embed_in",
            Role.ATTENTION_NORM: "input_layernorm",
            Role.QKV: "attention.query_key_value",
            Role.O: "attention.dense",
            Role.MLP_NORM: "post_attention_layernorm",
            Role.UP: "mlp.dense_h_to_4h",
            Role.DOWN: "mlp.dense_4h_to_h",
            Role.FINAL_NORM: "gpt_neox.final_layer_norm",
            Role.HEAD: "embed_out",
        }
    ),
    aliases={Role.HEAD: ("lm_head",)},
    layer_prefix="gpt_neox.layers.{layer}.",
    base_prefix="gpt_neox.",
    fused_qkv=FusedQkv.BY_HEAD,
    ignored_suffixes=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
GPTJ_NAMES = ParameterNames(
    stems=MappingProxyType(
        {
            Role.EMBEDDING: "transformer.wte",
            Role.ATTENTION_NORM: "ln_1",
            Role.Q: "attn.q_proj",
            Role.K: "attn.k_proj",
            Role.V: "attn.v_proj",
            Role.O: "attn.out_proj",
            Role.UP: "mlp.fc_in",
            Role.DOWN: "mlp.fc_out",
            Role.FINAL_NORM: "transformer.ln_f",
            Role.HEAD: "lm_head",
        }
    ),
    layer_prefix="transformer.h.{layer}.",
    base_prefix="transformer.",
    ignored_suffixes=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)
OPT_NAMES = ParameterNames(
    stems=MappingProxyType(
        {
            Role.EMBEDDING: "model.decoder.embed_tokens",
            Role.POSITIONS: "model.decoder.embed_positions",
            Role.ATTENTION_NORM: "self_attn_layer_norm",
            Role.Q: "self_attn.q_proj",
            Role.K: "self_attn.k_proj",
            Role.V: "self_attn.v_proj",
            Role.O: "self_attn.out_proj",
            Role.MLP_NORM: "final_layer_norm",
            Role.UP: "fc1",
            Role.DOWN: "fc2",
            Role.FINAL_NORM: "model.decoder.final_layer_norm",
            Role.HEAD: "lm_head",
        }
    ),
    layer_prefix="model.decoder.layers.{layer}.",
    base_prefix="model.",
)
FALCON_NAMES = ParameterNames(
    stems=BLOOM_NAMES.stems,
    aliases={Role.ATTENTION_NORM: ("ln_attn",), Role.MLP_NORM: ("ln_mlp",)},
    layer_prefix="transformer.h.{layer}.",
    base_prefix="transformer.",
    fused_qkv=FusedQkv.BY_HEAD,
)
MPT_NAMES = ParameterNames(
    stems=MappingProxyType(
        {
            Role.EMBEDDING: "transformer.wte",
            Role.ATTENTION_NORM: "norm_1",
            Role.QKV: "attn.Wqkv",
            Role.O: "attn.out_proj",
            Role.MLP_NORM: "norm_2",
            Role.UP: "ffn.up_proj",
            Role.DOWN: "ffn.down_proj",
            Role.FINAL_NORM: "transformer.norm_f",
            Role.HEAD: "lm_head",
        }
    ),
    layer_prefix="transformer.blocks.{layer}.",
    base_prefix="transformer.",
    fused_qkv=FusedQkv.IN_TURN,
)
STARCODER2_NAMES = ParameterNames(
    stems=MappingProxyType({**ParameterNames().stems, Role.UP: "mlp.c_fc", Role.DOWN: "mlp.c_proj"})
)


GPT_FAMILIES: tuple[Family, ...] = (
    Family(
        architecture="GPT2LMHeadModel",
        keys=GPT2_KEYS,
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
            "eos_token_id": 50256,
        },
        neutral={
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "reorder_and_upcast_attn": (None, False),
            "add_cross_attention": (None, False),
        },
        also=GPT2_ALSO,
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
            "eos_token_id": 2,
        },
        neutral={"apply_residual_connection_post_layernorm": (None, False)},
        also={
            "hidden_size": ("n_embed",),
            "n_layer": ("num_hidden_layers",),
            "n_head": ("num_attention_heads",),
        },
    ),
    Family(
        architecture="Starcoder2ForCausalLM",
        keys={"norm_eps": "norm_epsilon"},
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        norm=NormKind.LAYER,
        gated=False,
        window=Window.ALWAYS,
        names=STARCODER2_NAMES,
        defaults={
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": 50256,
        },
    ),
    Family(
        architecture="GPTNeoXForCausalLM",
        keys={"norm_eps": "layer_norm_eps", "num_kv_heads": "num_attention_heads"},
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=True,
        norm=NormKind.LAYER,
        place=NormPlace.PARALLEL_TWO,
        place_if=((("use_parallel_residual", False), NormPlace.PRE),),
        gated=False,
        rotary=Rotary(theta="rotary_emb_base", share="rotary_pct", default_share=0.25),
        names=NEOX_NAMES,
        defaults={
            "max_position_embeddings": 2048,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "use_parallel_residual": True,
            "eos_token_id": 2,
        },
    ),
    Family(
        architecture="GPTJForCausalLM",
        keys=GPT2_KEYS,
        mlp_bias=True,
        head_bias=True,
        norm=NormKind.LAYER,
        place=NormPlace.PARALLEL,
        gated=False,
        rotary=Rotary(dim="rotary_dim", interleaved=True),
        names=GPTJ_NAMES,
        defaults={
            "n_positions": 2048,
            "rotary_dim": 64,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "eos_token_id": 50256,
        },
        also=GPT2_ALSO,
    ),
    Family(
        architecture="OPTForCausalLM",
        keys={
            "num_kv_heads": "num_attention_heads",
            "mlp_width": "ffn_dim",
            "activation": "activation_function",
            "norm_eps": "layer_norm_eps",
        },
        qkv_bias="enable_bias",
        o_bias="enable_bias",
        mlp_bias="enable_bias",
        norm=NormKind.LAYER,
        place_if=((("do_layer_norm_before", False), NormPlace.POST_SUM),),
        no_final_norm_if=(("do_layer_norm_before", False), ("_remove_final_layer_norm", True)),
        gated=False,
        positions=PositionKind.LEARNED,
        position_offset=2,
        names=OPT_NAMES,
        defaults={
            "max_position_embeddings": 2048,
            "ffn_dim": 3072,
            "activation_function": "relu",
            "layer_norm_eps": 1e-5,
            "enable_bias": True,
            "do_layer_norm_before": True,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
        },
        neutral={"layer_norm_elementwise_affine": (None, True)},
        equal={"word_embed_proj_dim": "hidden_size"},
    ),
    Family(
        architecture="FalconForCausalLM",
        keys={
            "num_kv_heads": "num_kv_heads",
            "mlp_width": "ffn_hidden_size",
            "activation": "activation",
            "norm_eps": "layer_norm_epsilon",
        },
        qkv_bias="bias",
        o_bias="bias",
        mlp_bias="bias",
        norm=NormKind.LAYER,
        place=NormPlace.PARALLEL,
        place_if=(
            (("parallel_attn", False), NormPlace.PRE),
            (("num_ln_in_parallel_attn", 1), NormPlace.PARALLEL),
            (("new_decoder_architecture", True), NormPlace.PARALLEL_TWO),
        ),
        one_kv_head_if=(("new_decoder_architecture", False), ("multi_query", True)),
        gated=False,
        alibi_if="alibi",
        scales_alibi=True,
        names=FALCON_NAMES,
        defaults={
            "max_position_embeddings": 2048,
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "new_decoder_architecture": False,
            "multi_query": True,
            "parallel_attn": True,
            "tie_word_embeddings": True,
            "eos_token_id": 11,
        },
        also={"hidden_size": ("n_embed",)},
    ),
    Family(
        architecture="MptForCausalLM",
        keys={
            "hidden_size": "d_model",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
            "num_kv_heads": "n_heads",
            "mlp_width": "ffn_hidden_size",
            "context": "max_seq_len",
            "activation": "activation",
            "norm_eps": "layer_norm_epsilon",
        },
        norm=NormKind.LAYER,
        norm_bias=False,
        gated=False,
        positions=PositionKind.ALIBI,
        scales=Scales(scores="attn_config.softmax_scale"),
        names=MPT_NAMES,
        defaults={
            "max_seq_len": 2048,
            "activation": "gelu",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        neutral={
            "no_bias": (None, True),
            "expansion_ratio": (None, 4),
            "logit_scale": (None,),
            "embedding_fraction": (None, 1, 1.0),
            "norm_type": (None, "low_precision_layernorm", "layernorm"),
            "attn_config.attn_type": (None, "multihead_attention"),
            "attn_config.clip_qkv": (None, 0),
            "attn_config.qk_ln": (None, False),
            "attn_config.prefix_lm": (None, False),
            "attn_config.attn_uses_sequence_id": (None, False),
            "attn_config.alibi": (None, True),
            "attn_config.alibi_bias_max": (None, 8),
        },
        also={
            "d_model": ("hidden_size",),
            "n_layers": ("num_hidden_layers",),
            "n_heads": ("num_attention_heads",),
        },
        aliases=("MPTForCausalLM",),
    ),
)
