"""Many adapters from one: the same layers and sizes, other numbers, so that each has words of its own."""

import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "adapter_model.safetensors"


def save_varied(source: Path, folder: Path, seed: int, factor: float = 4.0) -> Path:
    """A copy whose products B x A are sums of the same rank-one parts times `factor`, with signs by `seed`. As loud as
    that an adapter has words of its own, whatever it is asked; they make no sense."""
    shutil.copytree(source, folder)
    rng = random.Random(seed)
    tensors = load_file(source / WEIGHTS)
    for name, tensor in tensors.items():
        if "lora_A" in name:
            tensor *= torch.tensor([rng.choice((-factor, factor)) for _ in tensor]).to(tensor.dtype)[:, None]
    save_file(tensors, folder / WEIGHTS)
    return folder


def zipf(names: int, draws: int, seed: int) -> list[int]:
    """So many draws of 0..names-1, the first the most often."""
    weights = [1 / (rank + 1) for rank in range(names)]
    return random.Random(seed).choices(range(names), weights, k=draws)
