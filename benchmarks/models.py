"""Random checkpoints of well-known shapes, for measurements of speed; made on first use, kept in out/models.

    python -m benchmarks.models qwen3-0.6b        # prints the folder

Weights are bf16 (or --dtype) and seeded. The tokenizer is made up so that every id decodes to text.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "models"
DEMO = ROOT / "configs" / "demo" / "model"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **QWEN3, **COMMON, "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    },
    "llama-8b": {
        **LLAMA, **COMMON, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "llama-135m": {
        **LLAMA, **COMMON, "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
    },
    "tiny": {
        **LLAMA, **COMMON, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    },
}  # fmt: skip


MODELS = f"demo, a folder, or one of {', '.join(sorted(SHAPES))}"


def find_model(name: str, dtype: str = "bfloat16") -> Path:
    """The folder of a model named as in MODELS; a shape's checkpoint is made if it is missing."""
    if name == "demo":
        return DEMO
    return model_folder(name, getattr(torch, dtype)) if name in SHAPES else Path(name)


def model_folder(shape: str, dtype: torch.dtype = torch.bfloat16, out: Path = OUT) -> Path:
    """The folder of the checkpoint of that shape below `out`, made now if it is missing."""
    kind = str(dtype).removeprefix("torch.")
    folder = out / f"{shape}-{kind}"
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = {**SHAPES[shape], "torch_dtype": kind}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        write_tokenizer(folder, int(str(config["vocab_size"])))
        save_file(_weights(config, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_folder(shape: str, out: Path = OUT) -> Path:
    """The folder of the shape's config and tokenizer alone, for engines that draw their weights (load_format dummy)."""
    folder = out / f"{shape}-config"
    folder.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[shape], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, int(str(config["vocab_size"])))
    return folder


def _weights(config: dict[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Matrices from Normal(0, 0.02), and ones for norms."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.02).to(dtype)
        for name, shape in _parameters(config)
    }


def _parameters(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields names and sizes of a Llama's or a Qwen3's parameters as transformers has them, in its order, without
    importing it, which takes longer than a small checkpoint."""
    hidden, width, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield "model.embed_tokens", (config["vocab_size"], hidden)
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{layer}.self_attn.{name}_proj", (rows * dim, hidden)
        yield f"{layer}.self_attn.o_proj", (hidden, heads * dim)
        if config["model_type"] == "qwen3":
            yield from ((f"{layer}.self_attn.{name}_norm", (dim,)) for name in "qk")
        yield from ((f"{layer}.mlp.{name}_proj", (width, hidden)) for name in ("gate", "up"))
        yield f"{layer}.mlp.down_proj", (hidden, width)
        yield from ((f"{layer}.{name}_layernorm", (hidden,)) for name in ("input", "post_attention"))
    yield "model.norm", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head", (config["vocab_size"], hidden)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a byte-level vocabulary without merges: two specials, 256 bytes, then made-up words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *alphabet]
    names += [f"Ġw{index}" for index in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    print(model_folder(options.shape, getattr(torch, options.dtype)))
