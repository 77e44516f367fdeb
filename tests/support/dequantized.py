"""Makes checkpoints whose linear layers and head hold what --quantization makes of them, for transformers."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.parallel.quantization.code_tables import NF4
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of


def rounded(weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight as int8 holds it: by output, to the nearest of 127 steps each way."""
    step_O1 = weight_OI.abs().amax(1, keepdim=True) / 127
    return torch.where(step_O1 > 0, (weight_OI / step_O1).round() * step_O1, 0)


def by_groups(round_group: Callable[[torch.Tensor], torch.Tensor], group: int, weight_OI: torch.Tensor) -> torch.Tensor:
    """The weight, each group of inputs of an output rounded by itself."""
    return torch.cat([round_group(part) for part in weight_OI.split(group, 1)], 1)


def divided(part_OG: torch.Tensor) -> torch.Tensor:
    """16 evenly spaced values from the least to the largest, of which 0 is one."""
    low, high = part_OG.amin(1, keepdim=True).clamp(max=0), part_OG.amax(1, keepdim=True).clamp(min=0)
    step = (high - low) / 15
    zero = (-low / step).round()
    return torch.where(step > 0, (((part_OG / step).round() + zero).clamp(0, 15) - zero) * step, 0)


def normal(part_OG: torch.Tensor) -> torch.Tensor:
    """The nearest of NF4's values."""
    largest = part_OG.abs().amax(1, keepdim=True)
    values = torch.tensor(NF4) * largest.unsqueeze(-1)
    return values.expand(*part_OG.shape, 16).gather(2, (values - part_OG.unsqueeze(-1)).abs().argmin(2, keepdim=True))[
        ..., 0
    ]


def floats(weight_OI: torch.Tensor) -> torch.Tensor:
    """E4M3 with a scale for each output."""
    scale = weight_OI.abs().amax(1, keepdim=True) / 448
    return torch.where(scale > 0, (weight_OI / scale).to(torch.float8_e4m3fn).float() * scale, 0)


FORMS = {
    "int8": rounded,
    "int4": partial(by_groups, divided, 128),
    "w4a8": partial(by_groups, divided, 128),
    "nf4": partial(by_groups, normal, 64),
    "fp8": floats,
}


def save_dequantized(folder: Path, target: Path, form: str = "int8") -> Path:
    """The model of `folder` with such weights, its head apart from the embedding."""
    spec, of_layers = load_spec(folder, quantization=form), FORMS[form]
    of_head = floats if form == "fp8" else rounded
    table = parameters_of(spec)
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    head = next(name for name in table.head.source.names if name in tensors)
    tensors[f"{table.head_name}.weight"] = of_head(tensors[head]).clone()
    for layer in table.layers:
        for param in layer.matrices:
            name = param.source.names[0]
            if param.scheme is not None and param.source.start == 0:  # a fused tensor once: its rows are independent
                weight = tensors[name].T if param.source.transposed else tensors[name]
                tensors[name] = (of_layers(weight).T if param.source.transposed else of_layers(weight)).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return target
