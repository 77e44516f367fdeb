"""ParameterNames: what a family's checkpoints call the parameters that parameters.py lists. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """The part of a model that a parameter is."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    EMBEDDING_NORM = "embedding_norm"
    ATTENTION_NORM = "attention_norm"
    QKV = "qkv"  # names the tensor of fused projections; parameters are Q, K and V
    Q = "q"
    Q_A = "q_a"
    Q_A_NORM = "q_a_norm"
    Q_B = "q_b"
    KV_A = "kv_a"
    KV_A_NORM = "kv_a_norm"
    KV_B = "kv_b"
    K = "k"
    V = "v"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    SINKS = "sinks"
    O = "o"  # noqa: E741 - the projection behind attention has this name everywhere
    ATTENTION_POST_NORM = "attention_post_norm"
    MLP_NORM = "mlp_norm"
    GATE_UP = "gate_up"  # names the tensor of both where they are fused
    GATE = "gate"
    UP = "up"
    DOWN = "down"
    MLP_POST_NORM = "mlp_post_norm"
    ROUTER = "router"
    ROUTER_CORRECTION = "router_correction"
    SHARED_GATE = "shared_gate"
    FINAL_NORM = "final_norm"
    HEAD = "head"


LLAMA_STEMS: Mapping[Role, str] = MappingProxyType(
    {
        Role.EMBEDDING: "model.embed_tokens",
        Role.ATTENTION_NORM: "input_layernorm",
        Role.Q: "self_attn.q_proj",
        Role.K: "self_attn.k_proj",
        Role.V: "self_attn.v_proj",
        Role.Q_NORM: "self_attn.q_norm",
        Role.K_NORM: "self_attn.k_norm",
        Role.SINKS: "self_attn",
        Role.O: "self_attn.o_proj",
        Role.MLP_NORM: "post_attention_layernorm",
        Role.GATE: "mlp.gate_proj",
        Role.UP: "mlp.up_proj",
        Role.DOWN: "mlp.down_proj",
        Role.FINAL_NORM: "model.norm",
        Role.HEAD: "lm_head",
    }
)


def stems(**changes: str) -> Mapping[Role, str]:
    """Returns Llama's names with others for some roles."""
    return MappingProxyType({**LLAMA_STEMS, **{Role[role]: stem for role, stem in changes.items()}})


class FusedQkv(StrEnum):
    """The tensors in which a checkpoint keeps q, k and v."""

    APART = "apart"  # three tensors
    IN_TURN = "in_turn"  # one: all rows of q, then k, then v
    BY_HEAD = "by_head"  # one: for each KV head the rows of its query heads, then its own of k and v


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterNames:
    """A family's names of parameters, without `.weight` and `.bias`; those of a layer follow layer_prefix with its
    index, those of an expert expert_prefix too. With a name of GATE_UP both are rows of one tensor, the gate's
    first."""

    stems: Mapping[Role, str] = field(default_factory=lambda: LLAMA_STEMS)
    aliases: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)  # other names that a checkpoint may use
    layer_prefix: str = "model.layers.{layer}."
    expert_prefix: str = "mlp.experts.{expert}."
    mlp_prefix: str = ""  # of an MLP's names, where an expert's are as short
    shared_prefix: str = "mlp.shared_expert."  # of the shared expert's
    base_prefix: str = "model."  # what names lack in a checkpoint without a head
    fused_qkv: FusedQkv = FusedQkv.APART
    transposed: bool = False  # matrices of layers are stored as [inputs, outputs]
    stacked_experts: bool = False  # one tensor has all experts' matrices
    # one tensor has them, as [experts, inputs, outputs], gate and up in turn; names end neither in `.weight` nor in
    # `.bias`, but those of biases in `_bias` (gpt-oss)
    interleaved_experts: bool = False
    norm_of_head: str | None = None  # where each head's norm of q or k is stored
    # of tensors that checkpoints may hold too, as they can be derived
    ignored_suffixes: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def stored(self, prefix: str, role: Role, suffix: str) -> tuple[str, ...]:
        """Returns the names that a tensor may have."""
        return tuple(f"{prefix}{stem}.{suffix}" for stem in (self.stems[role], *self.aliases.get(role, ())))

    def stored_interleaved(self, prefix: str, role: Role, suffix: str) -> tuple[str, ...]:
        """Returns the names of a tensor of all experts under interleaved_experts."""
        return (prefix + self.stems[role] + ("" if suffix == "weight" else f"_{suffix}"),)
