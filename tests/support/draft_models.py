"""Drafts for tests: the demo without its last layers, which guesses a third of what it says, and heads with random
weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import BY_NAME, save_tiny_model

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "model"


def shorter_demo(folder: Path, layers: int = 3) -> Path:
    """Writes the demo's first layers as a model of their own; returns its folder."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    tensors = {name: tensor for file in DEMO.glob("*.safetensors") for name, tensor in load_file(file).items()}
    left_out = tuple(f"model.layers.{layer}." for layer in range(layers, config["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(left_out)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


HIDDEN, WIDTH, HEADS, KV_HEADS, DIM, VOCAB = 256, 192, 4, 2, 32, 768
"""Sizes of the demo, and of heads for it."""
TAPS = (1, 2, 4)
KNOWN = 96
"""Ids that a random EAGLE-3 head guesses among: every eighth of the demo's."""

OF_LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB,
}
"""Keys of a head of one layer like a Llama's."""


def _drawing(seed: int) -> Callable[..., torch.Tensor]:
    """Draws matrices and vectors that keep the size of what they multiply."""
    rng = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=rng) * shape[-1] ** -0.5


def random_eagle(folder: Path, *, own_embedding: bool = False, normed_residual: bool = False) -> Path:
    """Writes an EAGLE-3 head for the demo as its makers do."""
    drawn = _drawing(3)
    ids = torch.arange(KNOWN) * 8 + 1
    tensors = {
        "fc.weight": drawn(HIDDEN, len(TAPS) * HIDDEN),
        "norm.weight": 1 + drawn(HIDDEN),
        "lm_head.weight": 4 * drawn(KNOWN, HIDDEN),
        "midlayer.hidden_norm.weight": 1 + drawn(HIDDEN),
        "midlayer.input_layernorm.weight": 1 + drawn(HIDDEN),
        "midlayer.post_attention_layernorm.weight": 1 + drawn(HIDDEN),
        "midlayer.self_attn.q_proj.weight": 3 * drawn(HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": 3 * drawn(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": drawn(KV_HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": 2 * drawn(HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": drawn(WIDTH, HIDDEN),
        "midlayer.mlp.up_proj.weight": drawn(WIDTH, HIDDEN),
        "midlayer.mlp.down_proj.weight": drawn(HIDDEN, WIDTH),
        "d2t": ids - torch.arange(KNOWN),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = drawn(VOCAB, HIDDEN)
    config = {
        **OF_LAYER,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": KNOWN,
        "norm_before_residual": normed_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*TAPS], "use_aux_hidden_state": True},
    }
    return _written(folder, config, tensors)


def random_eagle_one(folder: Path) -> Path:
    """Writes an EAGLE-1 head for the demo, without an embedding and a head of its own."""
    drawn = _drawing(4)
    tensors = {
        "fc.weight": drawn(HIDDEN, 2 * HIDDEN),
        "fc.bias": drawn(HIDDEN),
        "layers.0.post_attention_layernorm.weight": 1 + drawn(HIDDEN),
        "layers.0.self_attn.q_proj.weight": 3 * drawn(HEADS * DIM, HIDDEN),
        "layers.0.self_attn.k_proj.weight": 3 * drawn(KV_HEADS * DIM, HIDDEN),
        "layers.0.self_attn.v_proj.weight": drawn(KV_HEADS * DIM, HIDDEN),
        "layers.0.self_attn.o_proj.weight": 2 * drawn(HIDDEN, HEADS * DIM),
        "layers.0.mlp.gate_proj.weight": drawn(WIDTH, HIDDEN),
        "layers.0.mlp.up_proj.weight": drawn(WIDTH, HIDDEN),
        "layers.0.mlp.down_proj.weight": drawn(HIDDEN, WIDTH),
    }
    config = {**OF_LAYER, "architectures": ["EagleLlamaForCausalLM"]}
    return _written(folder, config, tensors)


def random_medusa(folder: Path, heads: int = 3) -> Path:
    """Writes Medusa's heads for the demo, of blocks of two layers."""
    rng = torch.Generator().manual_seed(5)
    tensors: dict[str, torch.Tensor] = {}
    for head in range(heads):
        for layer in range(2):
            tensors[f"blocks.{head}.layers.{layer}.weight"] = torch.randn(HIDDEN, HIDDEN, generator=rng) * 0.05
            tensors[f"blocks.{head}.layers.{layer}.bias"] = torch.randn(HIDDEN, generator=rng) * 0.1
        tensors[f"lm_heads.{head}.weight"] = torch.randn(VOCAB, HIDDEN, generator=rng)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "medusa_num_heads": heads,
        "medusa_num_layers": 2,
    }
    return _written(folder, config, tensors)


MTP_PREFIX = "model.layers.2."
"""Of the names of a layer that stands behind two."""


def random_mtp(root: Path, *, dense: bool = False) -> Path:
    """Writes a DeepSeek-V3 of two layers with the demo's tokenizer and a third one that guesses; returns its folder.
    root/whole: the same with three layers, for transformers. dense: without experts."""
    tiny = BY_NAME["deepseek_v3"]
    changes = {**tiny.changes, "num_hidden_layers": 3, "vocab_size": VOCAB, "max_position_embeddings": 2048}
    if dense:
        changes["first_k_dense_replace"] = 3
    folder = root / "model"
    shutil.copytree(save_tiny_model(replace(tiny, name="whole", changes=changes), root), folder)
    config = json.loads((folder / "config.json").read_text())
    rng, size = torch.Generator().manual_seed(2), config["hidden_size"]
    extra = {
        "enorm": 1 + torch.randn(size, generator=rng) * 0.1,
        "hnorm": 1 + torch.randn(size, generator=rng) * 0.1,
        "eh_proj": torch.randn(size, 2 * size, generator=rng) * size**-0.5,
        "shared_head.norm": 1 + torch.randn(size, generator=rng) * 0.1,
        "shared_head.head": torch.randn(VOCAB, size, generator=rng),
    }
    save_file(
        {f"{MTP_PREFIX}{name}.weight": tensor for name, tensor in extra.items()}, folder / "model-mtp.safetensors"
    )
    names = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


def _written(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
