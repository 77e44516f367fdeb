"""GGUF files of tiny models, written by code of its own, and folders with the weights that blocks stand for, for
transformers.

Each pack function takes a matrix [outputs, inputs] and returns its rows of bytes and the matrix that they stand for.
"""

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, np.dtype[Any]]
Packed = tuple[Array, Array]
NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "IQ2_XXS": 16, "BF16": 30}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps", "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}  # fmt: skip
OF_GEMMA2 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
ARCHITECTURES = {
    "gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}  # fmt: skip
IN_PAIRS = ("llama", "mistral", "mixtral", "granite", "smollm3")
"""Families that llama.cpp's converter permutes q and k of (LlamaModel and what inherits undo_permute from it)."""
IN_F32 = ("mlp.gate.", "block_sparse_moe.gate.", "shared_expert_gate.")
NUMBERS_OF = {
    "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
    "expert_count": ("num_local_experts", "num_experts"), "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
"""Metadata that converters write where config.json has the key, or one of them."""


# ---- the file ----


def write_gguf(
    file: Path, metadata: Mapping[str, Any], tensors: Sequence[tuple[str, str, tuple[int, ...], bytes]]
) -> None:
    """tensors: name, kind, sizes (rows first), data."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def kind_of(value: Any) -> int:
        return {bool: 7, int: 4, float: 6, str: 8, list: 9}[type(value)]

    def packed(value: Any) -> bytes:
        if isinstance(value, list):
            head = struct.pack("<IQ", kind_of(value[0]), len(value))
            return head + b"".join(map(packed, value))
        if isinstance(value, str):
            return text(value)
        return struct.pack({7: "<?", 4: "<I", 6: "<f"}[kind_of(value)], value)

    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += [text(key), struct.pack("<I", kind_of(value)), packed(value)]
    offset = 0
    for name, kind, sizes, data in tensors:
        parts += [text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes[::-1])]
        parts.append(struct.pack("<IQ", NUMBERS[kind], offset))
        offset += len(data) + -len(data) % 32
    head = b"".join(parts)
    file.write_bytes(head + bytes(-len(head) % 32) + b"".join(data + bytes(-len(data) % 32) for *_, data in tensors))


# ---- the model ----


def save_gguf(
    folder: Path, file: Path, kind: Callable[[str], str], more: Mapping[str, Any] | None = None, parts: int = 1
) -> tuple[Path, Path]:
    """The model of a folder as GGUF, and a folder with the weights that this stands for. kind: of each matrix, by its
    name in the folder. more: metadata. parts: files; the first is returned."""
    config = json.loads((folder / "config.json").read_text())
    given, plain, tensors = load_file(folder / "model.safetensors"), {}, []
    stacks: dict[str, tuple[str, tuple[int, ...], dict[int, bytes]]] = {}
    for name, tensor in given.items():
        array = tensor.float().numpy()
        of = kind(name) if array.ndim == 2 and not any(router in name for router in IN_F32) else "F32"
        if name.endswith("norm.weight") and "gemma" in config["model_type"]:
            array = array + 1
        turned = config["model_type"] in IN_PAIRS and name.split(".")[-2] in ("q_proj", "k_proj")
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        if turned:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        data, found = PACK[of](array)
        if (expert := re.search(r"\.experts\.(\d+)", name)) is not None:
            stack = stacks.setdefault(name.replace(expert[0], ".experts"), (of, array.shape, {}))
            stack[2][int(expert[1])] = data.tobytes()
        else:
            sizes = array.shape[1:] if "shared_expert_gate" in name else array.shape
            tensors.append((name_in_gguf(name, config["model_type"]), of, sizes, data.tobytes()))
        if turned:
            found = found.reshape(heads, -1, 2, *found.shape[1:]).swapaxes(1, 2).reshape(found.shape)
        if name.endswith("norm.weight") and "gemma" in config["model_type"]:
            found = found - 1
        plain[name] = torch.from_numpy(np.ascontiguousarray(found, np.float32))
    for name, (of, sizes, parts_of) in stacks.items():
        data_of_all = b"".join(parts_of[expert] for expert in sorted(parts_of))
        tensors.append((name_in_gguf(name, config["model_type"]), of, (len(parts_of), *sizes), data_of_all))
    tensors += [(name, "F32", factors.shape, factors.tobytes()) for name, factors in _rope_factors(config).items()]
    metadata = {**metadata_of(config), **(more or {})}
    files = [file] if parts == 1 else [
        file.with_name(f"{file.stem}-{part:05}-of-{parts:05}.gguf") for part in range(1, parts + 1)
    ]  # fmt: skip
    for part, one in enumerate(files):
        write_gguf(one, metadata if part == 0 else {"split.no": part}, tensors[part::parts])
    target = file.parent / f"{file.stem}-plain"
    shutil.copytree(folder, target)
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    return files[0], target


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    kind, rope = config["model_type"], config["rope_parameters"]
    name = ARCHITECTURES.get(kind, kind)
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    found = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "rope.dimension_count": dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if "gemma" in name or kind in ("mistral", "mixtral", "phi3"):
        found["attention.sliding_window"] = config.get("sliding_window") or 0
    if name == "gemma2":
        found["attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        found["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if kind == "phi3":
        found["rope.dimension_count"] = int(dim * rope.get("partial_rotary_factor", 1.0))
        trained = found["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        if "long_factor" in rope:
            scale = config["max_position_embeddings"] / trained
            found["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(trained))
    for key, names in NUMBERS_OF.items():
        for one in (names,) if isinstance(names, str) else names:
            if one in config:
                found[key] = config[one]
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in found.items()}}


def name_in_gguf(name: str, kind: str) -> str:
    stem, _, suffix = name.rpartition(".")
    names = {**NAMES, **(OF_GEMMA2 if kind in ("gemma2", "gemma3_text") else {})}
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{suffix}"
    _, _, layer, inside = stem.split(".", 3)
    return f"blk.{layer}.{names[inside]}.{suffix}"


def _rope_factors(config: Mapping[str, Any]) -> Mapping[str, Array]:
    """What llama.cpp's converter writes for Llama 3.1, and for Phi 3 of long contexts."""
    rope = config["rope_parameters"]
    if "long_factor" in rope:
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    dim, factors = config["head_dim"], []
    low, high = (rope["original_max_position_embeddings"] / rope[f"{end}_freq_factor"] for end in ("low", "high"))
    for place in range(dim // 2):
        length = 2 * np.pi * rope["rope_theta"] ** (2 * place / dim)
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(rope["factor"])
        else:
            smooth = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


# ---- blocks ----


def _blocks(matrix: Array, size: int) -> Array:
    return matrix.reshape(len(matrix), -1, size)


def _rows(*parts: Array) -> Array:
    """Blocks of these parts, [outputs, blocks, elements] each, as rows of bytes."""
    as_bytes = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
    return np.concatenate(as_bytes, -1).reshape(len(parts[0]), -1)


def _f16(numbers: Array) -> Array:
    return numbers.astype(np.float16)


def _codes(numbers: Array, top: int) -> Array:
    return np.clip(np.round(np.nan_to_num(numbers)), 0, top).astype(np.uint8)


def f32(matrix: Array) -> Packed:
    return matrix.astype(np.float32), matrix


def f16(matrix: Array) -> Packed:
    return _f16(matrix), _f16(matrix).astype(np.float32)


def bf16(matrix: Array) -> Packed:
    rounded = torch.from_numpy(matrix.copy()).bfloat16()
    return rounded.view(torch.uint8).numpy(), rounded.float().numpy()


def q4_0(matrix: Array) -> Packed:
    blocks = _blocks(matrix, 32)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    scale = _f16(peak / -8)
    codes = _codes(blocks / scale.astype(np.float32) + 8, 15)
    found = (codes.astype(np.float32) - 8) * scale.astype(np.float32)
    return _rows(scale, codes[..., :16] | codes[..., 16:] << 4), found.reshape(matrix.shape)


def q4_1(matrix: Array) -> Packed:
    blocks = _blocks(matrix, 32)
    least = _f16(blocks.min(-1, keepdims=True))
    scale = _f16((blocks.max(-1, keepdims=True) - least) / 15)
    codes = _codes((blocks - least) / scale.astype(np.float32), 15)
    found = codes * scale.astype(np.float32) + least.astype(np.float32)
    return _rows(scale, least, codes[..., :16] | codes[..., 16:] << 4), found.reshape(matrix.shape)


def q8_0(matrix: Array) -> Packed:
    blocks = _blocks(matrix, 32)
    scale = _f16(np.abs(blocks).max(-1, keepdims=True) / 127)
    codes = np.clip(np.round(blocks / scale.astype(np.float32)), -127, 127).astype(np.int8)
    return _rows(scale, codes), (codes * scale.astype(np.float32)).reshape(matrix.shape)


def q4_k(matrix: Array) -> Packed:
    groups = _blocks(matrix, 256).reshape(len(matrix), -1, 8, 32)
    low = np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) - low) / 15
    scale, of_low = _f16(steps.max(-1, keepdims=True) / 63), _f16(-low.min(-1, keepdims=True) / 63)
    scales, lows = _codes(steps / scale.astype(np.float32), 63), _codes(-low / of_low.astype(np.float32), 63)
    scales[0, 0, 0] = 0  # a group without a scale, all of which is its least value
    wide = (scale.astype(np.float32) * scales)[..., None]
    least = (of_low.astype(np.float32) * lows)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = _codes((groups + least) / wide, 15)
    found = wide * codes - least
    packed = np.empty((*scales.shape[:2], 12), np.uint8)
    for group in range(4):
        packed[..., group] = scales[..., group] | scales[..., group + 4] >> 4 << 6
        packed[..., 4 + group] = lows[..., group] | lows[..., group + 4] >> 4 << 6
        packed[..., 8 + group] = scales[..., group + 4] & 15 | (lows[..., group + 4] & 15) << 4
    pairs = (codes[..., 0::2, :] | codes[..., 1::2, :] << 4).reshape(*scales.shape[:2], 128)
    return _rows(scale, of_low, packed, pairs), found.reshape(matrix.shape)


def q6_k(matrix: Array) -> Packed:
    groups = _blocks(matrix, 256).reshape(len(matrix), -1, 16, 16)
    steps = np.abs(groups).max(-1) / 31
    scale = _f16(steps.max(-1, keepdims=True) / 127)
    scales = np.round(steps / scale.astype(np.float32)).astype(np.int8)
    wide = (scale.astype(np.float32) * scales)[..., None]
    codes = _codes(groups / wide + 32, 63)
    found = wide * (codes.astype(np.float32) - 32)
    four = codes.reshape(*scales.shape[:2], 2, 4, 32)
    low = np.stack([four[..., 0, :] & 15 | four[..., 2, :] << 4, four[..., 1, :] & 15 | four[..., 3, :] << 4], -2)
    high = sum((four[..., place, :] >> 4) << 2 * place for place in range(4))
    shape = scales.shape[:2]
    return _rows(low.reshape(*shape, 128), high.reshape(*shape, 64), scales, scale), found.reshape(matrix.shape)


PACK: Mapping[str, Callable[[Array], Packed]] = {
    "F32": f32, "F16": f16, "BF16": bf16, "Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q6_K": q6_k,
    "IQ2_XXS": lambda matrix: (np.zeros((len(matrix), matrix.shape[1] // 256 * 66), np.uint8), matrix),
}  # fmt: skip
