"""config.json's keys, and the names that the model has for tensors, of a GGUF file's metadata. Torch-free.

What the metadata says and no key has is refused by name. llama.cpp's rule for rotary positions of Llama 3 stands in a
tensor, rope_freqs.weight: its factors are compared with those that config.json's keys would make.
"""

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tandem.configs.errors import UnsupportedModelError
from tandem.parallel.quantization.layouts.gguf_blocks import FORMS
from tandem.parallel.stored.gguf_header import GgufFile
from tandem.parallel.stored.gguf_kinds import BLOCK_NAMES
from tandem.parallel.stored.headers import StoredTensor
from tandem.workers.gguf.gguf_rows import OUTSIDE, ROWS, STEMS, GgufRow
from tandem.workers.models.spec.family_rows.families import family_of
from tandem.workers.models.spec.weights.gguf import BLOCKS, IN_PAIRS, METHOD, WHOLE_NORMS

ROPE_FACTORS: Final = "rope_freqs.weight"
LAYER: Final = re.compile(r"blk\.(\d+)\.(.+)")
READ: Final = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "vocab_size", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier",
    "rope.scaling.attn_factor", "attention.sliding_window", "attention.sliding_window_pattern",
    "attn_logit_softcapping", "final_logit_softcapping", "rope.freq_base_swa", "attention.causal",
)  # fmt: skip
"""Keys behind the architecture's name that are read or change nothing."""
REQUANTIZE: Final = (
    "take another file of the model, or make one: llama-quantize --allow-requantize {file} NEW.gguf Q4_K_M"
)
LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BIG_GEMMAS: Final = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of models whose scores are scaled by hidden size over heads, as llama.cpp has them."""


class _Metadata:
    """The keys of one architecture."""

    def __init__(self, name: str, metadata: Mapping[str, Any]) -> None:
        self.name = name
        self._given = {
            key.removeprefix(f"{name}."): value for key, value in metadata.items() if key.startswith(f"{name}.")
        }
        for key, value in self._given.items():
            if key not in READ and value not in (0, False, None, "", []):
                raise UnsupportedModelError(f"GGUF: {name}.{key} is {value!r}, which is not read", "MODEL")

    def get(self, key: str, default: Any = None) -> Any:
        return self._given.get(key, default)

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns an integer, of a list one that all layers share."""
        value = self._given.get(key, default)
        found = set(value) if isinstance(value, list) else {value}
        if len(found) != 1 or not isinstance(one := found.pop(), int) or one < 1:
            raise UnsupportedModelError(
                f"GGUF: {self.name}.{key} is {value!r}, want a positive integer for all layers", "MODEL"
            )
        return one

    def real(self, key: str, default: float) -> float:
        """Returns a number of float32 as one would write it."""
        return float(f"{self._given.get(key, default):.7g}")


def gguf_row(file: GgufFile) -> tuple[str, GgufRow]:
    """Returns a file's architecture. UnsupportedModelError for one that is not read."""
    name, kind = file.metadata.get("general.architecture"), file.metadata.get("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{file.file} is GGUF of a {kind}, not of a model", "MODEL")
    if name not in ROWS:
        raise UnsupportedModelError(
            f"{file.file}: GGUF of the architecture {name!r} is not read; read are {', '.join(ROWS)}. Others are "
            "served from their checkpoints in safetensors",
            "MODEL",
        )
    return str(name), ROWS[str(name)]


def gguf_tensors(files: Sequence[GgufFile]) -> dict[str, StoredTensor]:
    """Returns the tensors of all files under the names that the model has for them; others keep theirs. files: the
    parts of a model, the first with the metadata."""
    names = family_of(gguf_row(files[0])[1].family).names
    stems = {stem: role for role, stem in STEMS.items()}
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in file.tensors.items():
            layer = LAYER.fullmatch(name)
            prefix = "" if layer is None else names.layer_prefix.format(layer=layer[1])
            stem, _, suffix = (name if layer is None else layer[2]).rpartition(".")
            role = stems.get(stem)
            is_known = role in names.stems and (role in OUTSIDE) is (layer is None)
            found[names.stored(prefix, role, suffix)[0] if role is not None and is_known else name] = tensor
    found.pop(ROPE_FACTORS, None)
    return found


def gguf_config(files: Sequence[GgufFile]) -> dict[str, Any]:
    """Returns config.json's keys. UnsupportedModelError for what is not read."""
    architecture, row = gguf_row(files[0])
    found, tensors = _Metadata(architecture, files[0].metadata), gguf_tensors(files)
    raw = {name: tensor for file in files for name, tensor in file.tensors.items()}
    heads, hidden = found.whole("attention.head_count"), found.whole("embedding_length")
    head_dim = found.whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if found.whole(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"GGUF: {architecture}.{key} is {found.get(key)}, where a head has {head_dim} elements", "MODEL"
            )
    if found.get("attention.causal", True) is not True:
        raise UnsupportedModelError(f"GGUF: {architecture}.attention.causal is false: no model that writes", "MODEL")
    window = found.get("attention.sliding_window") if row.window else None
    config: dict[str, Any] = {
        "architectures": [row.windowed if window and row.windowed else row.family],
        "model_type": row.model_type,
        "vocab_size": _rows(raw, "token_embd.weight"),
        "hidden_size": hidden,
        "intermediate_size": found.whole("feed_forward_length"),
        "num_hidden_layers": found.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": found.whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": found.whole("context_length"),
        "rms_norm_eps": found.real("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": "output.weight" not in raw,
        "rope_theta": found.real("rope.freq_base", 10000.0),
        "torch_dtype": _dtype(tensors),
        **row.fixed,
    }
    if window:
        config["sliding_window"] = window
    if row.model_type not in ("qwen2",):
        config["attention_bias"] = "blk.0.attn_q.bias" in raw
    if row.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in raw
    config |= _of_gemmas(found, config)
    if (scaling := _scaling(found, files, head_dim, config["rope_theta"])) is not None:
        config["rope_scaling"] = scaling
    return {**config, "quantization_config": _weights(files[0], row, tensors)}


def _rows(raw: Mapping[str, StoredTensor], name: str) -> int:
    if name not in raw:
        raise UnsupportedModelError(f"GGUF: tensor {name} is in none of its files", "MODEL")
    return raw[name].shape[0]


def _dtype(tensors: Mapping[str, StoredTensor]) -> str:
    """Returns the dtype of the model's matrices; bfloat16 where they are blocks."""
    kinds = {tensor.dtype for tensor in tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F16"}): "float16", frozenset({"F32"}): "float32"}.get(frozenset(kinds), "bfloat16")


def _of_gemmas(found: _Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    if found.name == "gemma":
        return {"hidden_act": "gelu_pytorch_tanh"}
    if found.name not in ("gemma2", "gemma3"):
        return {"hidden_act": "silu"}
    is_big = (found.name, config["num_hidden_layers"]) in BIG_GEMMAS
    by = config["hidden_size"] // config["num_attention_heads"] if is_big else config["head_dim"]
    more: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": by}
    if found.name == "gemma3":
        pattern = found.get("attention.sliding_window_pattern")
        local = {"rope_local_base_freq": found.real("rope.freq_base_swa", config["rope_local_base_freq"])}
        return {**more, **local, **({"sliding_window_pattern": pattern} if isinstance(pattern, int) else {})}
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return {**more, **{key: found.real(key, default) for key, default in caps.items()}}


def _scaling(found: _Metadata, files: Sequence[GgufFile], head_dim: int, theta: float) -> dict[str, Any] | None:
    """Returns config.json's rope_scaling."""
    kind, factor = found.get("rope.scaling.type", "none"), found.get("rope.scaling.factor", 0.0)
    factors = next((file.tensors[ROPE_FACTORS] for file in files if ROPE_FACTORS in file.tensors), None)
    if factors is not None:
        return _llama3(_floats(factors), head_dim, theta)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn" or found.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(f"GGUF: {found.name}.rope.scaling.type is {kind!r}, read: linear, yarn", "MODEL")
    trained = found.whole("rope.scaling.original_context_length")
    return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained}


def _floats(tensor: StoredTensor) -> tuple[float, ...]:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        data = stream.read(tensor.nbytes)
    if tensor.dtype != "F32":
        raise UnsupportedModelError(f"GGUF: tensor {tensor.name} is {tensor.dtype}, want F32", "MODEL")
    return struct.unpack(f"<{len(data) // 4}f", data)


def _llama3(factors: Sequence[float], head_dim: int, theta: float) -> dict[str, Any] | None:
    """Returns the scaling by which frequencies are divided by these factors: none, or Llama 3's."""
    if all(factor == 1.0 for factor in factors):
        return None
    scaling = {"rope_type": "llama3", "factor": float(f"{max(factors):.5g}"), **LLAMA3}
    low, high, trained = LLAMA3.values()
    for place, found in enumerate(factors):
        turns = trained / (2 * math.pi * theta ** (2 * place / head_dim))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        wanted = 1 / ((1 - smooth) / max(factors) + smooth)
        if len(factors) != head_dim // 2 or not math.isclose(found, wanted, rel_tol=1e-4):
            raise UnsupportedModelError(
                f"GGUF: {ROPE_FACTORS} has {found:g} at {place}, where Llama 3's rule makes {wanted:g}: others "
                "are not read",
                "MODEL",
            )
    return scaling


def _weights(file: GgufFile, row: GgufRow, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Returns the quantization_config that weights/gguf.py reads."""
    blocks: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in BLOCK_NAMES:
            continue
        if tensor.dtype not in FORMS:
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, which is not read, as "
                f"{', '.join(FORMS)} are: {REQUANTIZE.format(file=file.file.name)}",
                "MODEL",
            )
        blocks.setdefault(tensor.dtype, []).append(name.rpartition(".")[0])
    return {
        "quant_method": METHOD,
        BLOCKS: blocks,
        IN_PAIRS: row.heads_in_pairs,
        WHOLE_NORMS: row.whole_norms,
    }
