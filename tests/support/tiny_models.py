"""Tiny random checkpoints of every registered family, saved by transformers itself: seconds to make, not to be trusted
with words.

Used by the parity tests, and by anything that needs a real checkpoint folder quickly. Weights are spread wide enough
that logits differ clearly, biases and norms are random too, so that a forgotten one shows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
)
BY_NAME: Mapping[str, TinyModel] = {model.name: model for model in TINY_MODELS}


STORED_BELOW: Mapping[str, float] = {"gemma2": 1.0}
"""What norms of a family are stored less by."""


def save_tiny_model(tiny: TinyModel, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Makes the checkpoint in folder/name and returns that. transformers writes config.json, with its newest keys."""
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
    target = folder / tiny.name
    model.to(dtype).save_pretrained(target, max_shard_size=tiny.max_shard_size)
    return target


def load_peer(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' own model of a checkpoint, with its plainest attention and experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    return model.eval()
