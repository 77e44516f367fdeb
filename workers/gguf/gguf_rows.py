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
    fixed: what no metadata says.
    """

    family: str
    model_type: str
    windowed: str | None = None
    heads_in_pairs: bool = False
    whole_norms: bool = False
    window: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)


ROWS: Final[Mapping[str, GgufRow]] = {
    "llama": GgufRow(
        family="LlamaForCausalLM", model_type="llama", windowed="MistralForCausalLM", heads_in_pairs=True, window=True
    ),
    "qwen2": GgufRow(family="Qwen2ForCausalLM", model_type="qwen2"),
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
}

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
    }
)
"""llama.cpp's names; those of layers stand behind `blk.INDEX.`."""
OUTSIDE: Final = (Role.EMBEDDING, Role.FINAL_NORM, Role.HEAD)
