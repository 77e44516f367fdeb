"""Quantized checkpoints of tiny models, packed by code of its own, and the same models with the weights that the codes
stand for, for transformers.

Each pack function takes a matrix [outputs, inputs] and returns its tensors, by the ends of their names, and the matrix
that they stand for. Bits are packed by numpy's bit strings, so that nothing is shared with what unpacks them.
"""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.models.spec.parameter_names import Role

Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor], Packed]


@dataclass(frozen=True, slots=True)
class Format:
    """A quantized form. config: quantization_config; head: the head is in it too."""

    name: str
    config: Mapping[str, Any]
    pack: Pack
    head: bool = False
    rounds_inputs: bool = False


def save_quantized(
    folder: Path, target: Path, form: Format, dense: Collection[str] = (), config: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """The model of `folder` in that form, and with the weights that it stands for. dense: parts of names of layers that
    stay as they are. config: in place of the form's own."""
    spec = load_spec(folder)
    table, tensors = parameters_of(spec), load_file(folder / "model.safetensors")
    names = [param.source.names[0] for layer in table.layers for param in layer.matrices]
    names += [f"{table.head_name}.weight"] * (form.head and not spec.tie_word_embeddings)
    unread = [
        param.source.names[0] for layer in table.layers for param in layer.matrices if param.role == Role.SHARED_GATE
    ]
    quantized, plain = dict(tensors), dict(tensors)
    for name in dict.fromkeys(names):
        if name in unread or any(part in name for part in dense):
            continue
        stem = name.removesuffix(".weight")
        parts, plain[name] = form.pack(quantized.pop(name).float())
        quantized |= {f"{stem}.{end}": tensor.contiguous() for end, tensor in parts.items()}
    found = []
    for kind, given in (("quantized", quantized), ("dequantized", plain)):
        found.append(target / f"{form.name}-{kind}")
        shutil.copytree(folder, found[-1])
        save_file(
            {name: t.contiguous() for name, t in given.items()}, found[-1] / "model.safetensors", {"format": "pt"}
        )
    written = json.loads((folder / "config.json").read_text())
    (found[0] / "config.json").write_text(json.dumps({**written, "quantization_config": {**(config or form.config)}}))
    return found[0], found[1]


# ---- bits ----


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of codes as rows of 32-bit words, bit behind bit from the lowest on."""
    rows = codes.numpy().astype(np.uint8)
    strings = np.unpackbits(rows[..., None], axis=-1, bitorder="little", count=bits).reshape(len(rows), -1)
    strings = np.pad(strings, ((0, 0), (0, -strings.shape[1] % 32)))
    return torch.from_numpy(np.packbits(strings, axis=-1, bitorder="little").view("<i4").copy())


def grouped(weight: torch.Tensor, group: int | None, top: int, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes [O, I], scales [O, G] that float16 holds, zeros [O, G], of groups of inputs that follow one another."""
    size, codes, scales, zeros = group or weight.shape[1], [], [], []
    for part in weight.split(size, 1):
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        middle = (top + 1) // 2
        scale = (part.abs().amax(1) / (middle - 0.5) if symmetric else (high - low) / top).half().float()
        zero = torch.full_like(scale, middle) if symmetric else (-low / scale).round()
        codes.append(((part / scale[:, None]).round() + zero[:, None]).clamp(0, top))
        scales.append(scale)
        zeros.append(zero)
    return torch.cat(codes, 1), torch.stack(scales, 1), torch.stack(zeros, 1)


def undone(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int | None) -> torch.Tensor:
    size = group or codes.shape[1]
    index = torch.arange(codes.shape[1]) // size
    return (codes - zero[:, index]) * scale[:, index]


def _places(inputs: int) -> torch.Tensor:
    """An order of inputs."""
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))


# ---- integers in words ----


def gptq(bits: int = 4, group: int | None = 32, *, sym: bool = False, order: bool = False, v2: bool = False) -> Format:
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": order, "sym": sym,
        "damp_percent": 0.01, "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }  # fmt: skip

    def pack(weight: torch.Tensor) -> Packed:
        inputs = weight.shape[1]
        places = (
            torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) if order else torch.arange(inputs)
        )
        codes, scale, zero = grouped(weight[:, places], group, 2**bits - 1, symmetric=sym)
        dense, stored, index = torch.empty_like(weight), torch.empty_like(codes), torch.empty(inputs, dtype=torch.int32)
        dense[:, places], stored[:, places] = undone(codes, scale, zero, group), codes
        index[places] = (torch.arange(inputs) // (group or inputs)).int()
        return {
            "qweight": words_of(stored, bits).T,
            "qzeros": words_of((zero if v2 else (zero - 1) % 2**bits).T, bits),
            "scales": scale.half().T,
            "g_idx": index,
        }, dense

    kind = f"gptq{'_v2' if v2 else ''}-{bits}-{group}{'-sym' if sym else ''}{'-order' if order else ''}"
    return Format(kind, config, pack)


def awq(group: int = 32) -> Format:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}

    def words(codes: torch.Tensor) -> torch.Tensor:  # [outputs, ...] to [..., words]
        eights = codes.T.reshape(codes.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return words_of(eights.reshape(codes.shape[1], -1), 4)

    def pack(weight: torch.Tensor) -> Packed:
        codes, scale, zero = grouped(weight, group, 15, symmetric=False)
        parts = {"qweight": words(codes), "qzeros": words(zero), "scales": scale.half().T}
        return parts, undone(codes, scale, zero, group)

    return Format(f"awq-{group}", config, pack)


def group_of(num_bits: int, group: int | None, *, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": num_bits, "type": "int", "strategy": "channel" if group is None else "group", "group_size": group,
        "symmetric": symmetric, "dynamic": False, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    return {
        "targets": ["Linear"],
        "weights": {**weights, **more},
        "input_activations": None,
        "output_activations": None,
    }


def tensors_config(form: str, group: Mapping[str, Any], ignore: Collection[str] = ("lm_head",)) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {**group}},
        "ignore": [*ignore], "kv_cache_scheme": None, "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }  # fmt: skip


def packed(bits: int = 4, group: int | None = 32, *, sym: bool = True, order: bool = False) -> Format:
    own = group_of(bits, group, symmetric=sym, **({"actorder": "group"} if order else {}))

    def pack(weight: torch.Tensor) -> Packed:
        inputs = weight.shape[1]
        places = _places(inputs) if order else torch.arange(inputs)
        codes, scale, zero = grouped(weight[:, places], group, 2**bits - 1, symmetric=sym)
        dense, stored, index = torch.empty_like(weight), torch.empty_like(codes), torch.empty(inputs, dtype=torch.int32)
        dense[:, places], stored[:, places] = undone(codes, scale, zero, group), codes
        index[places] = (torch.arange(inputs) // (group or inputs)).int()
        parts = {
            "weight_packed": words_of(stored, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not sym:
            parts["weight_zero_point"] = words_of(zero.T, bits).T
        if order:
            parts["weight_g_idx"] = index
        return parts, dense

    name = f"packed-{bits}-{group}{'-sym' if sym else ''}{'-order' if order else ''}"
    return Format(name, tensors_config("pack-quantized", own), pack)


def bytes_of(*, a8: bool = False, group: int | None = None, sym: bool = True) -> Format:
    """int-quantized of compressed-tensors. a8: inputs are rounded too."""
    own = group_of(8, group, symmetric=sym)
    if a8:
        inputs = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
        own["input_activations"] = inputs

    def pack(weight: torch.Tensor) -> Packed:
        codes, scale, zero = grouped(weight, group, 255, symmetric=sym)
        parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
        if not sym:
            parts["weight_zero_point"] = (zero - 128).to(torch.int8)
        return parts, undone(codes, scale, zero, group)

    name = f"bytes-{group}{'-sym' if sym else ''}{'-a8' if a8 else ''}"
    return Format(name, tensors_config("int-quantized", own), pack, rounds_inputs=a8)
