"""config.json's keys of a GGUF file's metadata. Torch-free.

What the metadata says and no key has is refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tandem.configs.errors import UnsupportedModelError
from tandem.parallel.quantization.layouts.gguf_blocks import FORMS
from tandem.parallel.stored.gguf_header import GgufFile
from tandem.parallel.stored.gguf_kinds import BLOCK_NAMES
from tandem.parallel.stored.headers import StoredTensor
from tandem.workers.gguf.gguf_metadata import Metadata
from tandem.workers.gguf.gguf_names import gguf_row, gguf_tensors
from tandem.workers.gguf.gguf_rope import rope_scaling
from tandem.workers.gguf.gguf_rows import GgufRow
from tandem.workers.models.spec.weights.gguf import BLOCKS, IN_PAIRS, METHOD, WHOLE_NORMS, of_any_expert

REQUANTIZE: Final = (
    "take another file of the model, or make one: llama-quantize --allow-requantize {file} NEW.gguf Q4_K_M"
)
ROUTERS: Final = (".ffn_gate_inp.weight", ".ffn_gate_inp_shexp.weight")
"""Ends of names of matrices that files have in F32, whatever the model's dtype is."""
BIG_GEMMAS: Final = {("gemma2", 46), ("gemma3", 62)}
"""Architecture and layers of models whose scores are scaled by hidden size over heads, as llama.cpp has them."""


def gguf_config(files: Sequence[GgufFile]) -> dict[str, Any]:
    """Returns config.json's keys. UnsupportedModelError for what is not read."""
    architecture, row = gguf_row(files[0])
    found, tensors = Metadata(architecture, files[0].metadata, row), gguf_tensors(files)
    raw = {name: tensor for file in files for name, tensor in file.tensors.items()}
    heads, hidden = found.whole("attention.head_count"), found.whole("embedding_length")
    head_dim, rotating = _head(found, row, hidden // heads)
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
        "torch_dtype": _dtype(raw),
        **{key: found.number(name) for key, name in row.numbers.items()},
        **row.fixed,
    }
    if window:
        config["sliding_window"] = window
    if row.rotates_part:
        config["partial_rotary_factor"] = rotating / head_dim
    if row.qkv_bias is not None:
        config[row.qkv_bias] = "blk.0.attn_q.bias" in raw
    if row.mlp_bias:
        config["mlp_bias"] = "blk.0.ffn_up.bias" in raw
    config |= _of_gemmas(found, config)
    if (scaling := rope_scaling(found, raw, rotating, config["rope_theta"])) is not None:
        config["rope_scaling"] = scaling
    return {**config, "quantization_config": _weights(files[0], row, tensors)}


def _head(found: Metadata, row: GgufRow, default: int) -> tuple[int, int]:
    """Returns the elements of a head, and how many of them rotate. UnsupportedModelError for heads that are not
    read. default: elements without a key."""
    head_dim = found.whole("attention.key_length", default)
    rotating = found.whole("rope.dimension_count", head_dim)
    for key in ("attention.value_length", *(() if row.rotates_part else ("rope.dimension_count",))):
        if found.whole(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"GGUF: {found.name}.{key} is {found.get(key)}, where a head has {head_dim} elements", "MODEL"
            )
    for key in ("attention.causal", *row.true):
        if found.get(key, True) is not True:
            raise UnsupportedModelError(f"GGUF: {found.name}.{key} is false, which is not read", "MODEL")
    return head_dim, rotating


def _rows(raw: Mapping[str, StoredTensor], name: str) -> int:
    if name not in raw:
        raise UnsupportedModelError(f"GGUF: tensor {name} is in none of its files", "MODEL")
    return raw[name].shape[0]


def _dtype(raw: Mapping[str, StoredTensor]) -> str:
    """Returns the dtype of the model's matrices; bfloat16 where they are blocks."""
    kinds = {one.dtype for name, one in raw.items() if len(one.shape) > 1 and not name.endswith(ROUTERS)}
    return {frozenset({"F16"}): "float16", frozenset({"F32"}): "float32"}.get(frozenset(kinds), "bfloat16")


def _of_gemmas(found: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
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


def _weights(file: GgufFile, row: GgufRow, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Returns the quantization_config that weights/gguf.py reads."""
    blocks: dict[str, dict[str, None]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in BLOCK_NAMES:
            continue
        if tensor.dtype not in FORMS:
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {tensor.name} is {tensor.dtype}, which is not read, as "
                f"{', '.join(FORMS)} are: {REQUANTIZE.format(file=file.file.name)}",
                "MODEL",
            )
        blocks.setdefault(tensor.dtype, {})[of_any_expert(name.rpartition(".")[0])] = None
    return {
        "quant_method": METHOD,
        BLOCKS: {kind: list(layers) for kind, layers in blocks.items()},
        IN_PAIRS: row.heads_in_pairs,
        WHOLE_NORMS: row.whole_norms,
    }
