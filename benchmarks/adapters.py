"""Random LoRA adapters in PEFT's form, for speed only: made on first use, kept in out/adapters.

Each has its own seed, so its own content and digest. `modules` are projections as PEFT names them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from workers.models.spec import ArchSpec

OUT = Path(__file__).resolve().parents[1] / "out" / "adapters"
QV = ("q_proj", "v_proj")
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCKS = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}


def shapes_of(spec: ArchSpec) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every projection of a layer."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, mlp),
        "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
    }


def adapter_bytes(spec: ArchSpec, rank: int, modules: Sequence[str], element_bytes: int) -> int:
    """A [rank, inputs] and B [outputs, rank] of every module in every layer."""
    shapes = shapes_of(spec)
    return element_bytes * rank * spec.num_layers * sum(sum(shapes[module]) for module in modules)


def adapter_folders(name: str, spec: ArchSpec, count: int, rank: int, modules: Sequence[str]) -> list[Path]:
    """`count` folders for the model called `name`, bf16."""
    parent = OUT / f"{name}-r{rank}-{'all' if tuple(modules) == ALL_LINEARS else '-'.join(modules)}"
    folders = [parent / f"a{index}" for index in range(count)]
    missing = [index for index, folder in enumerate(folders) if not (folder / "adapter_config.json").exists()]
    for index in tqdm(missing, desc="making adapters", unit="adapter", leave=False):
        _write(folders[index], spec, rank, modules, seed=index)
    return folders


def _write(folder: Path, spec: ArchSpec, rank: int, modules: Sequence[str], seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(spec.num_layers):
        for module in modules:
            inputs, outputs = shapes_of(spec)[module]
            stem = f"base_model.model.model.layers.{layer}.{BLOCKS.get(module, 'self_attn')}.{module}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator).mul_(0.02).bfloat16()
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator).mul_(0.02).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))
