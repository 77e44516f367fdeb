"""The checkpoint of a shape in the forms that peers read, made once under out/models.

OPENVINO_PYTHON -m benchmarks.peers.openvino_model FOLDER TARGET    # in the peer's own Python, see there
"""

import json
import shutil
import subprocess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.models import OUT, model_folder
from tests.support.gguf_files import PACK, metadata_of, name_in_gguf, write_gguf
from tests.support.quantized import group_of, tensors_config

LEVELS = 127
NO_TOKENIZER = "none"


def gguf_file(shape: str) -> Path:
    """The shape as GGUF: matrices in Q4_0, the embedding, which is the head too, in Q8_0."""
    target = OUT / f"{shape}-q4_0.gguf"
    if target.exists():
        return target
    folder = model_folder(shape)
    config = json.loads((folder / "config.json").read_text())
    tensors = []
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind = "F32" if tensor.dim() == 1 else "Q8_0" if "embed" in name else "Q4_0"
        data, _ = PACK[kind](tensor.float().numpy())
        tensors.append((name_in_gguf(name, config["model_type"]), kind, tuple(tensor.shape), data.tobytes()))
    part = target.with_suffix(".part")
    config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
    sizes = {"tokenizer.ggml.model": NO_TOKENIZER, f"{config['model_type']}.vocab_size": config["vocab_size"]}
    write_gguf(part, {**metadata_of(config), **sizes}, tensors)
    part.rename(target)
    return target


def w8a8_folder(shape: str) -> Path:
    """The shape as compressed-tensors' int-quantized: int8 weights by output, inputs rounded by token, a dense head."""
    folder, target = model_folder(shape), OUT / f"{shape}-w8a8"
    if (target / "model.safetensors").exists():
        return target
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    parts: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() == 1 or "embed" in name or "lm_head" in name:
            parts[name] = tensor
            continue
        scale_O1 = tensor.float().abs().amax(1, keepdim=True) / LEVELS
        parts[name] = (tensor.float() / scale_O1).round().to(torch.int8)
        parts[f"{name.removesuffix('.weight')}.weight_scale"] = scale_O1.bfloat16()
    group = group_of(8, None, symmetric=True)
    group["input_activations"] = {**group["weights"], "strategy": "token", "dynamic": True, "observer": None}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = tensors_config("int-quantized", group)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    save_file(parts, target / "model.safetensors", {"format": "pt"})
    return target


def openvino_folder(shape: str, python: str) -> Path:
    """The shape in OpenVINO's form with weights of 4 bits, made by the given Python."""
    folder, target = model_folder(shape), OUT / f"{shape}-openvino-int4"
    if not (target / "openvino_model.xml").exists():
        subprocess.run([python, "-m", "benchmarks.peers.openvino_model", str(folder), str(target)], check=True)
    return target
