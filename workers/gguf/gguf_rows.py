"""The architectures of GGUF files that are read, as rows of data; llama.cpp's names of their tensors. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from tandem.workers.models.spec.parameter_names import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufRow:
    """One architecture of llama.cpp's. family: that of transformers; with a window windowed, if there is one.

    heads_in_pairs: rows of q and k are stored with those of a head's halves in turn, as llama.cpp turns them.
    whole_norms: norms are stored as they multiply, where transformers' checkpoints have them less one.
    window: keys of attention.sliding_window are read.
    rotates_part: a part of a head may rotate.
    qkv_bias: config.json's key of whether q, k and v have biases; None: the family says it. mlp_bias: it has that key.
    stems: names of tensors that stand for other parts than STEMS says.
    numbers: config.json's keys of numbers, and the metadata's, which must be there.
    true: the metadata's flags that must be true where they are there.
    fixed: what no metadata says.
    """

    family: str
    model_type: str
    windowed: str | None = None
    heads_in_pairs: bool = False
    whole_norms: bool = False
    window: bool = False
    rotates_part: bool = False
    qkv_bias: str | None = "attention_bias"
    mlp_bias: bool = False
    stems: Mapping[str, Role] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    true: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)


QWEN_EXPERTS: Final = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
ROWS: Final[Mapping[str, GgufRow]] = {
    "llama": GgufRow(
        family="LlamaForCausalLM",
        model_type="llama",
        windowed="MistralForCausalLM",
        heads_in_pairs=True,
        window=True,
        mlp_bias=True,
    ),
    "qwen2": GgufRow(family="Qwen2ForCausalLM", model_type="qwen2", qkv_bias=None),
    "qwen3": GgufRow(family="Qwen3ForCausalLM", model_type="qwen3"),
    "gemma": GgufRow(family="GemmaForCausalLM", model_type="gemma", whole_norms=True),
    "gemma2": GgufRow(family="Gemma2ForCausalLM", model_type="gemma2", whole_norms=True, window=True),
    "gemma3": GgufRow(
        family="Gemma3ForCausalLM",
        model_type="gemma3_text",
        whole_norms=True,
        window=True,
        fixed={"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0},
    ),
    "phi3": GgufRow(
        family="Phi3ForCausalLM",
        model_type="phi3",
        window=True,
        rotates_part=True,
        stems={"attn_qkv": Role.QKV, "ffn_up": Role.GATE_UP},
    ),
    "granite": GgufRow(
        family="GraniteForCausalLM",
        model_type="granite",
        mlp_bias=True,
        heads_in_pairs=True,
        numbers={
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        true=("rope.scaling.finetuned",),  # false: no layer rotates
    ),
    "smollm3": GgufRow(
        family="SmolLM3ForCausalLM",
        model_type="smollm3",
        mlp_bias=True,
        heads_in_pairs=True,
        fixed={"no_rope_layer_interval": 4},  # llama.cpp has no key for it
    ),
    "qwen2moe": GgufRow(
        family="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        qkv_bias="qkv_bias",
        numbers={**QWEN_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": GgufRow(
        family="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        numbers=QWEN_EXPERTS,
        fixed={"norm_topk_prob": True},
    ),
}
WITH_EXPERTS: Final[Mapping[str, GgufRow]] = {
    "llama": GgufRow(
        family="MixtralForCausalLM",
        model_type="mixtral",
        heads_in_pairs=True,
        window=True,
        numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    ),
}
"""The rows of architectures that are another family's where they have an expert_count."""

STEMS: Final[Mapping[Role, str]] = MappingProxyType(
    {
        Role.EMBEDDING: "token_embd",
        Role.FINAL_NORM: "output_norm",
        Role.HEAD: "output",
        Role.ATTENTION_NORM: "attn_norm",
        Role.Q: "attn_q",
        Role.K: "attn_k",
        Role.V: "attn_v",
        Role.O: "attn_output",
        Role.Q_NORM: "attn_q_norm",
        Role.K_NORM: "attn_k_norm",
        Role.ATTENTION_POST_NORM: "post_attention_norm",
        Role.MLP_NORM: "ffn_norm",
        Role.GATE: "ffn_gate",
        Role.UP: "ffn_up",
        Role.DOWN: "ffn_down",
        Role.MLP_POST_NORM: "post_ffw_norm",
        Role.ROUTER: "ffn_gate_inp",
        Role.SHARED_GATE: "ffn_gate_inp_shexp",
    }
)
"""llama.cpp's names; those of layers stand behind `blk.INDEX.`, and EXPERTS or SHARED behind those of experts."""
EXPERTS: Final = "_exps"
"""The end of names of tensors [experts, outputs, inputs], which have a matrix of each expert."""
SHARED: Final = "_shexp"
"""The end of names of the expert's that all tokens pass."""
OUTSIDE: Final = (Role.EMBEDDING, Role.FINAL_NORM, Role.HEAD)
