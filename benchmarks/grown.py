"""A wide model that says what the demo model says: a target for drafts, which is bound by memory; kept in out/models.

    python -m benchmarks.grown --dtype bfloat16        # prints the folder

It is no model that anybody trained. It is the demo model (4 layers of 256), put into as wide a body as is asked for, so
that a step reads as many bytes as one of a model of that size, and its tokens are those of a trained model: a draft of
the demo model guesses them as well as it guesses the demo's own. Its vocabulary stays the demo's, 768 ids, so the head
is far smaller than such a model's would be.

Equal logits: the residual stream gets zeros in its further columns, which norms weigh by sqrt(narrow / wide), as they
divide by the root of a mean over more columns, and whose eps is as much smaller. Further heads and MLP rows have random
weights behind columns of zeros of o_proj and down_proj; in further layers these are all zeros.

A draft model reads tokens alone, so that the demo's is its draft. Medusa's heads read the hidden state: the demo's are
made as wide (grown_heads()), and guess what they guess for the demo.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from benchmarks.models import DEMO, OUT

LAYERS: Final = 28
HIDDEN: Final = 1024
INTERMEDIATE: Final = 3072
SPREAD: Final = 0.02
"""Standard deviation of the weights that change nothing."""
COPIED: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
Tensors = dict[str, torch.Tensor]


def grown_folder(
    dtype: torch.dtype = torch.bfloat16,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
    intermediate: int = INTERMEDIATE,
    out: Path = OUT,
) -> Path:
    """The folder of the demo model in `layers` layers of `hidden`, below `out`, made now if it is missing. ValueError
    for a size that the demo model does not fit into: hidden has to be a multiple of its 256."""
    kind = str(dtype).removeprefix("torch.")
    folder = out / f"grown-{layers}x{hidden}-{kind}"
    if not (folder / "model.safetensors").exists():
        own = json.loads((DEMO / "config.json").read_text())
        config = _config(own, layers, hidden, intermediate, kind)
        folder.mkdir(parents=True, exist_ok=True)
        for name in COPIED:
            shutil.copyfile(DEMO / name, folder / name)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        demo = {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}
        made = {name: tensor.to(dtype) for name, tensor in _weights(demo, own, config).items()}
        new = folder / "model.safetensors.new"
        save_file(made, new, metadata={"format": "pt"})
        new.replace(folder / "model.safetensors")
    return folder


def grown_heads(heads: Path, target: Path) -> Path:
    """The folder of the demo's Medusa heads for a target of grown_folder(), made beside it: equal guesses, and the
    weights that heads of its size read. Further rows of the blocks are random, further columns of the tables zeros."""
    config = json.loads((heads / "config.json").read_text())
    narrow, wide = config["hidden_size"], json.loads((target / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(1)
    made: Tensors = {}
    for name, tensor in load_file(heads / "model.safetensors").items():
        if name.startswith("lm_heads"):
            made[name] = torch.zeros(len(tensor), wide, dtype=tensor.dtype)
            made[name][:, :narrow] = tensor
        elif tensor.dim() == 1:
            made[name] = torch.zeros(wide, dtype=tensor.dtype)
            made[name][:narrow] = tensor
        else:
            made[name] = (torch.randn(wide, wide, generator=generator) * SPREAD).to(tensor.dtype)
            made[name][:narrow] = 0
            made[name][:narrow, :narrow] = tensor
    folder = target.with_name(f"{target.name}-medusa")
    folder.mkdir(exist_ok=True)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": wide}, indent=1))
    return folder


def _config(own: dict[str, Any], layers: int, hidden: int, intermediate: int, kind: str) -> dict[str, Any]:
    times, rest = divmod(hidden, own["hidden_size"])
    if rest or not times or layers < own["num_hidden_layers"] or intermediate < own["intermediate_size"]:
        narrow = f"{own['num_hidden_layers']} layers of {own['hidden_size']} x {own['intermediate_size']}"
        raise ValueError(f"{layers} layers of {hidden} x {intermediate}: the demo model has {narrow}")
    return {
        **own,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": own["num_attention_heads"] * times,
        "num_key_value_heads": own["num_key_value_heads"] * times,
        "rms_norm_eps": own["rms_norm_eps"] / times,
        "dtype": kind,
        "torch_dtype": kind,
    }


def _weights(demo: Tensors, own: dict[str, Any], config: dict[str, Any]) -> Tensors:
    """Returns the wide model's tensors, float32."""
    generator = torch.Generator().manual_seed(0)
    hidden, narrow = config["hidden_size"], own["hidden_size"]
    heads, kv_heads = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (config["intermediate_size"], hidden),
        "mlp.up_proj": (config["intermediate_size"], hidden),
        "mlp.down_proj": (hidden, config["intermediate_size"]),
    }

    def norm(name: str) -> torch.Tensor:
        wide = torch.ones(hidden)
        if name in demo:
            wide[:narrow] = demo[name] * (narrow / hidden) ** 0.5
        return wide

    embedding = torch.zeros(own["vocab_size"], hidden)
    embedding[:, :narrow] = demo["model.embed_tokens.weight"]
    made = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm("model.norm.weight")}
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        for place in ("input_layernorm", "post_attention_layernorm"):
            made[f"{stem}{place}.weight"] = norm(f"{stem}{place}.weight")
        for place, shape in shapes.items():
            name = f"{stem}{place}.weight"
            writes = place.endswith(("o_proj", "down_proj"))  # into the residual stream, where nothing may change
            wide = torch.zeros(shape) if writes else torch.randn(shape, generator=generator) * SPREAD
            if (small := demo.get(name)) is not None:
                wide[: len(small)] = 0
                wide[: len(small), : small.shape[1]] = small
            made[name] = wide
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--intermediate", type=int, default=INTERMEDIATE)
    options = parser.parse_args()
    print(grown_folder(getattr(torch, options.dtype), options.layers, options.hidden, options.intermediate))
