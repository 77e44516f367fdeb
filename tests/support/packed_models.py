"""What a checkpoint of compressed-tensors stands for, undone by code of its own, for transformers; sequences of ids to
quantize tiny models with, which have no tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.quantize.calibration_text import Sequences
from tandem.workers.quantize.quantize_run import open_source, quantize
from tandem.workers.quantize.quantize_settings import QuantizeSettings

LENGTH = 32


def random_ids(count: int, length: int = LENGTH, vocabulary: int = 200) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, vocabulary, (count, length), generator=generator).tolist()  # type: ignore[no-any-return]


def quantized(
    folder: Path, output: Path, settings: QuantizeSettings, count: int = 24, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Quantizes a tiny model; returns the report."""
    *calibration, judged = random_ids(count + 1)
    given = Sequences(calibration, [judged])
    return quantize(open_source(str(folder), folder), settings, output, CpuPlatform(), say, given)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def undone(folder: Path, target: Path) -> Path:
    """The same model with the weights that its codes stand for."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = tensors_in(folder)
    for name in [name for name in tensors if name.endswith((".weight_packed", ".weight")) and _is_coded(name, tensors)]:
        stem = name.rpartition(".")[0]
        parts = {end: tensors.pop(f"{stem}.{end}", None) for end in ENDS}
        tensors[f"{stem}.weight"] = _dense(parts)
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


ENDS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape")


def _is_coded(name: str, tensors: dict[str, torch.Tensor]) -> bool:
    return f"{name.rpartition('.')[0]}.weight_scale" in tensors


def _dense(parts: dict[str, torch.Tensor | None]) -> torch.Tensor:
    packed, scale, zeros, shape = (parts[end] for end in ("weight_packed", *ENDS[2:]))
    assert scale is not None
    if packed is None:
        codes = parts["weight"]
        assert codes is not None
        return codes.float() * scale
    assert shape is not None
    outputs, inputs = shape.tolist()
    bits = next(bits for bits in (2, 3, 4, 8) if -(-inputs * bits // 32) == packed.shape[1])
    codes = _codes(packed, bits, inputs)
    middle = torch.full((outputs, scale.shape[1]), 2.0 ** (bits - 1))
    zero = middle if zeros is None else _codes(zeros.T, bits, outputs).T
    size = inputs // scale.shape[1]
    return (codes - zero.repeat_interleave(size, 1)) * scale.float().repeat_interleave(size, 1)


def _codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Rows of words as rows of codes."""
    strings = np.unpackbits(words.contiguous().numpy().view(np.uint8), axis=1, bitorder="little")[:, : count * bits]
    return torch.from_numpy(strings.reshape(len(strings), count, bits) @ (1 << np.arange(bits))).float()
