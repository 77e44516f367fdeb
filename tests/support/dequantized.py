"""Makes checkpoints whose linear layers and head hold what --quantization int8 makes of them, for transformers."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of


def rounded(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight as int8 holds it: by output, to the nearest of 127 steps each way."""
    step_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    return torch.where(step_O1 > 0, (weight_OI / step_O1).round() * step_O1, 0)


def save_dequantized(folder: Path, target: Path) -> Path:
    """The model of `folder` with such weights, its head apart from the embedding."""
    spec = load_spec(folder, quantization="int8")
    table = parameters_of(spec)
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    head = next(name for name in table.head.source.names if name in tensors)
    tensors[f"{table.head_name}.weight"] = rounded(tensors[head]).clone()
    for layer in table.layers:
        for param in layer.matrices:
            name = param.source.names[0]
            if param.scheme is not None and param.source.start == 0:  # a fused tensor once: its rows are independent
                weight = tensors[name].T if param.source.transposed else tensors[name]
                tensors[name] = (rounded(weight).T if param.source.transposed else rounded(weight)).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return target
