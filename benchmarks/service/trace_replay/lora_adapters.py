"""Random LoRA adapters in PEFT's form, and engines and jobs for measurements of their speed.

Adapters are made on first use and kept in out/adapters. Each has its own seed, and so its own content and digest.
`modules` are projections by PEFT's names.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from benchmarks.engine.engine_run import cpu_settings
from benchmarks.models import ROOT, find_model
from benchmarks.service.trace_replay.trace import LORA_PROMPT
from benchmarks.workload import Job, random_prompt
from tandem.configs.schema import EngineSettings, LoraSettings
from tandem.workers.lora.peft.peft_folder import adapter_digest
from tandem.workers.messages.request import AdapterRef
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.adapter_room import count_pages, fullest_stage

OUT = ROOT / "out" / "adapters"
QV = ("q_proj", "v_proj")
ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_MODEL_LEN = 512
BLOCKS = {"gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}


@dataclass(frozen=True)
class AdapterSet:
    """Adapters of one rank on the same modules of one model, as given to find_model."""

    model: str
    rank: int
    modules: Sequence[str] = QV

    @property
    def spec(self) -> ArchSpec:
        return load_spec(find_model(self.model))

    @property
    def nbytes(self) -> int:
        """Bytes of one adapter in bf16: A [rank, inputs] and B [outputs, rank] of every module in every layer."""
        spec = self.spec
        shapes = shapes_of(spec)
        return 2 * self.rank * spec.num_layers * sum(sum(shapes[module]) for module in self.modules)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device pages of one adapter, in bf16."""
        page, _ = fullest_stage(self.spec, 1, 1, self.rank)
        shapes = shapes_of(self.spec)
        lengths = [length for module in self.modules for length in shapes[module]] * self.spec.num_layers
        return 2 * page * count_pages(lengths, self.rank, page)

    def folder(self, index: int) -> Path:
        """The folder of one adapter, whether or not it has been made."""
        kind = "all" if tuple(self.modules) == ALL_LINEARS else "-".join(self.modules)
        return OUT / f"{Path(self.model).name}-r{self.rank}-{kind}" / f"a{index}"

    def folders(self, count: int) -> list[Path]:
        """`count` folders, each made if it is missing."""
        folders = [self.folder(index) for index in range(count)]
        missing = [index for index, folder in enumerate(folders) if not (folder / "adapter_config.json").exists()]
        for index in tqdm(missing, desc="making adapters", unit="adapter", leave=False):
            _write(folders[index], self.spec, self.rank, self.modules, seed=index)
        return folders

    def references(self, count: int) -> list[AdapterRef]:
        return [reference_of(folder) for folder in self.folders(count)]

    def drawn(self, count: int) -> "DrawnAdapters":
        """As many adapters, of which those are made that are drawn."""
        return DrawnAdapters(self, count)

    def settings(self, room: int, *, known: int | None = None) -> LoraSettings:
        """Settings of a device with room for `room` adapters and no more, and a host for `known`."""
        return LoraSettings(
            enable_lora=True,
            max_loras=room,
            max_lora_rank=self.rank,
            max_cpu_loras=known or room,
            memory_bytes=room * self.device_bytes,
        )


class DrawnAdapters(Sequence[AdapterRef]):
    """References to `count` adapters, each of which is made when it is first asked for."""

    def __init__(self, adapters: AdapterSet, count: int) -> None:
        self._adapters = adapters
        self._count = count
        self._made: dict[int, AdapterRef] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(self._count)[index]]
        if index not in self._made:
            folder = self._adapters.folder(index)
            if not (folder / "adapter_config.json").exists():
                _write(folder, self._adapters.spec, self._adapters.rank, self._adapters.modules, seed=index)
            self._made[index] = reference_of(folder)
        return self._made[index]


def reference_of(folder: Path) -> AdapterRef:
    """The reference that requests carry to the adapter in a folder."""
    return AdapterRef(name=folder.name, digest=adapter_digest(folder), source=str(folder))


def shapes_of(spec: ArchSpec) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of every projection of a layer."""
    hidden, mlp = spec.hidden_size, spec.layers[0].mlp.width
    q, kv = spec.layers[0].attention.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    return {
        "q_proj": (hidden, q),
        "k_proj": (hidden, kv),
        "v_proj": (hidden, kv),
        "o_proj": (q, hidden),
        "gate_proj": (hidden, mlp),
        "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
    }


def engine_settings(options: argparse.Namespace, rows: int, lora: LoraSettings) -> EngineSettings:
    """Settings of an engine for the model of the options, as a service has them."""
    folder = find_model(options.model)
    return cpu_settings(folder, options.threads, MAX_MODEL_LEN, rows=rows, async_scheduling=True, lora=lora)


def random_jobs(count: int, output_len: int, vocab_size: int, seed: str) -> list[Job]:
    """Jobs with prompts of LORA_PROMPT tokens."""
    draw = random.Random(seed)
    return [Job(random_prompt(draw, LORA_PROMPT, vocab_size), output_len) for _ in range(count)]


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
