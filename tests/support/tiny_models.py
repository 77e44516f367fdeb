"""Tiny random checkpoints of every registered family, saved by transformers itself: seconds to make, not to be trusted
with words.

Used by the parity tests, and by anything that needs a real checkpoint folder quickly. Weights are spread wide enough
that logits differ clearly, biases and norms are random too, so that a forgotten one shows.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.kept_files import kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE: Mapping[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One checkpoint: transformers' model_type, what differs from BASE, and how it is saved."""

    name: str
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    max_shard_size: str = "1GB"

    @property
    def is_shallow(self) -> bool:
        """Whether make test leaves some of its tests to make parity."""
        return self.changes.get("num_hidden_layers") == 2


def shallow(name: str, changes: Mapping[str, Any], model_type: str = "") -> TinyModel:
    """A model of two layers: enough for what its layers do."""
    return TinyModel(name, model_type or name, {"num_hidden_layers": 2, **changes})


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.5, 6.0],
    "original_max_position_embeddings": 16,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
GEMMA3 = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
FALCON_RW = {"alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
EVEN = {"q_lora_rank": 64, "v_head_dim": 24}
"""Widths that the products of few rows take (tests/parity/test_replayed_steps.py)."""
GROUPS = {"n_group": 4, "topk_group": 2}
MSCALED = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}

TINY_MODELS: tuple[TinyModel, ...] = (
    TinyModel("llama-gqa", "llama"),
    TinyModel("llama-mha-tied", "llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    TinyModel("llama-mqa-biased", "llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    TinyModel("llama-wide-heads", "llama", {"head_dim": 32}),
    TinyModel("llama-many-files", "llama", max_shard_size="40KB"),
    TinyModel("llama-gelu", "llama", {"hidden_act": "gelu_pytorch_tanh"}),
    TinyModel("llama-rope-llama3", "llama", {"rope_parameters": LLAMA3}),
    TinyModel("llama-rope-yarn", "llama", {"rope_parameters": YARN}),
    TinyModel(
        "llama-rope-linear",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    TinyModel(
        "llama-rope-dynamic",
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "max_position_embeddings": 48,
        },
    ),
    TinyModel("mistral-window", "mistral", {"sliding_window": 24}),
    TinyModel("mistral-full", "mistral", {"sliding_window": None}),
    TinyModel("qwen2", "qwen2", {"tie_word_embeddings": True}),
    TinyModel("qwen2-window", "qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    TinyModel("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    TinyModel("qwen3-untied", "qwen3", {"head_dim": 24, "attention_bias": True}),
    TinyModel("smollm3", "smollm3", {"no_rope_layer_interval": 2}),
    TinyModel("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    TinyModel("mixtral-window", "mixtral", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20}),
    TinyModel("gemma2", "gemma2", {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 24}),
    TinyModel("gpt2", "gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    TinyModel("gpt2-narrow", "gpt2", {"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 256, "n_inner": 80}),
    TinyModel("bloom", "bloom", {"n_layer": 4, "n_head": 4}),
    TinyModel("bloom-six-heads", "bloom", {"hidden_size": 96, "n_layer": 4, "n_head": 6}),
    shallow("phi3", {"sliding_window": 24}),
    shallow("phi3-longrope", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16}, "phi3"),
    shallow("granite", GRANITE),
    shallow("olmo", {"num_key_value_heads": 4}),
    shallow("olmo2", {}),
    shallow("gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    shallow("gemma3", {"head_dim": 32, "query_pre_attn_scalar": 24, **GEMMA3}, "gemma3_text"),
    shallow("starcoder2", {"sliding_window": 20}),
    shallow("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    shallow("stablelm-parallel", {"use_parallel_residual": True, "num_key_value_heads": 4}, "stablelm"),
    shallow("cohere", {"use_qk_norm": True}),
    shallow("cohere-plain", {"attention_bias": True}, "cohere"),
    shallow("gpt_neox", {"rotary_pct": 0.5}),
    shallow("gpt_neox-in-turn", {"use_parallel_residual": False}, "gpt_neox"),
    shallow("opt", {"ffn_dim": 96}),
    shallow("opt-post", {"ffn_dim": 96, "do_layer_norm_before": False}, "opt"),
    shallow("gptj", {"n_embd": 64, "n_head": 4, "n_positions": 256, "rotary_dim": 8}),
    shallow("falcon", {}),
    shallow("falcon-groups", {"new_decoder_architecture": True, "num_kv_heads": 2}, "falcon"),
    shallow("falcon-alibi", FALCON_RW, "falcon"),
    shallow("mpt", {"d_model": 64, "n_heads": 4, "max_seq_len": 256}),
    shallow("mpt-six-heads", {"d_model": 96, "n_heads": 6, "max_seq_len": 256}, "mpt"),
    shallow(
        "ministral", {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    ),
    shallow("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    shallow("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    shallow("qwen2_moe-sparse", {**EXPERTS, "decoder_sparse_step": 2}, "qwen2_moe"),
    shallow("qwen3_moe-sparse", {**EXPERTS, "mlp_only_layers": [0]}, "qwen3_moe"),
    shallow(
        "deepseek_v2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    shallow("deepseek_v2-lite", {**DEEPSEEK, **EVEN, "q_lora_rank": None, "rope_parameters": MSCALED}, "deepseek_v2"),
    shallow("deepseek_v3", {**DEEPSEEK, **EVEN, **GROUPS, "rope_parameters": MSCALED}),
    shallow(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    shallow("granitemoe", {**GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
)
GROUPED = TinyModel(
    "grouped",
    "gemma3_text",
    {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
)
"""Gemma 3 with windows that texts soon pass, on three of four layers: four groups with KV block tables of their own."""
BY_NAME: Mapping[str, TinyModel] = {model.name: model for model in TINY_MODELS}
ONE_OF_EACH = (
    "llama-gqa", "llama-mqa-biased", "mistral-window", "qwen2", "qwen3-untied", "smollm3", "mixtral", "gemma2", "gpt2",
    "bloom",
)  # fmt: skip
"""Of the models that are not shallow one or two of each type: the others differ in ropes, activations, numbers of heads
and files, which only some tests are about."""
SHALLOW = tuple(model.name for model in TINY_MODELS if model.is_shallow)


def some_in_parity(names: Iterable[str], but: Collection[str] = ()) -> list[Any]:
    """Parameters of a test: names of models, of which make parity runs the shallow ones, make test the others and
    `but`."""
    late = set(SHALLOW).difference(but)
    return [pytest.param(name, marks=pytest.mark.parity) if name in late else name for name in names]


STORED_BELOW: Mapping[str, float] = {"gemma": 1.0, "gemma2": 1.0, "gemma3_text": 1.0}
"""What norms of a family are stored less by."""


def save_tiny_model(tiny: TinyModel, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Saves the checkpoint in folder/name and returns that. Torch's random numbers begin with the seed afterwards."""
    target = folder / tiny.name
    made = kept(tiny.name, (tiny, seed, dtype), __file__, lambda new: _make(tiny, new, seed, dtype))
    shutil.copytree(made, target, dirs_exist_ok=True)
    torch.manual_seed(seed)
    return target


def _make(tiny: TinyModel, target: Path, seed: int, dtype: torch.dtype) -> None:
    """transformers writes config.json, with its newest keys."""
    from transformers import AutoConfig, AutoModelForCausalLM  # takes seconds to load

    torch.manual_seed(seed)
    config = AutoConfig.for_model(tiny.model_type, **{**BASE, **tiny.changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5).sub_(STORED_BELOW.get(tiny.model_type, 0.0))
            else:
                parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0, 0.3)
    model.to(dtype).save_pretrained(target, max_shard_size=tiny.max_shard_size)


def made_once(root: Path) -> Callable[[str], Path]:
    """Returns what gives the folder of a tiny model below root by its name, made when it is first asked for."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_tiny_model(BY_NAME[name], root)
        return made[name]

    return folder


def greedy_after(peer: Any, ids: list[int], told: list[int]) -> list[int]:
    """Returns the peer's most likely token at every place of `told` behind `ids`: where the two are equal, `told` is
    what it would write itself, for the price of one step."""
    with torch.inference_mode():
        logits_TV = peer(torch.tensor([[*ids, *told]])).logits[0]
    return logits_TV[len(ids) - 1 : -1].argmax(-1).tolist()  # type: ignore[no-any-return]


def load_peer(folder: Path, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """transformers' own model of a checkpoint, with its plainest attention and experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    has_alibi_twice = getattr(AutoConfig.from_pretrained(folder), "alibi", False)  # Falcon's plainest attention
    kind = "sdpa" if has_alibi_twice else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=kind)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.eval()
