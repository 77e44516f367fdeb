"""config.json's rope_scaling of a GGUF file's metadata. Torch-free.

llama.cpp's rule for rotary positions of Llama 3 stands in a tensor, rope_freqs.weight: its factors are compared with
those that config.json's keys would make. LongRoPE's factors are two tensors.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tandem.configs.errors import UnsupportedModelError
from tandem.parallel.stored.headers import StoredTensor
from tandem.workers.gguf.gguf_metadata import Metadata

LLAMA3_FACTORS: Final = "rope_freqs.weight"
LONG_ROPE: Final = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ROPE_TENSORS: Final = (LLAMA3_FACTORS, *LONG_ROPE.values())
"""Tensors that are read as numbers of the config."""
ATTENTION_FACTOR: Final = "rope.scaling.attn_factor"
LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_scaling(
    found: Metadata, raw: Mapping[str, StoredTensor], rotating: int, theta: float
) -> dict[str, Any] | None:
    """Returns config.json's rope_scaling. raw: the files' tensors. rotating: elements of a head that rotate."""
    kind, factor = found.get("rope.scaling.type", "none"), found.get("rope.scaling.factor", 0.0)
    if (factors := raw.get(LLAMA3_FACTORS)) is not None:
        return _llama3(_floats(factors), rotating, theta)
    if all(name in raw for name in LONG_ROPE.values()):
        return _long_rope(found, raw)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn" or found.get(ATTENTION_FACTOR, 1.0) != 1.0:
        raise UnsupportedModelError(f"GGUF: {found.name}.rope.scaling.type is {kind!r}, read: linear, yarn", "MODEL")
    trained = found.whole("rope.scaling.original_context_length")
    return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained}


def _long_rope(found: Metadata, raw: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Returns LongRoPE's numbers, which files of Phi 3 have without a rope.scaling.type."""
    scaling: dict[str, Any] = {
        key: [float(f"{one:.7g}") for one in _floats(raw[name])] for key, name in LONG_ROPE.items()
    }
    scaling["rope_type"] = "longrope"
    scaling["original_max_position_embeddings"] = found.whole("rope.scaling.original_context_length")
    if found.get(ATTENTION_FACTOR) is not None:
        scaling["attention_factor"] = found.real(ATTENTION_FACTOR, 1.0)
    return scaling


def _floats(tensor: StoredTensor) -> tuple[float, ...]:
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        data = stream.read(tensor.nbytes)
    if tensor.dtype != "F32":
        raise UnsupportedModelError(f"GGUF: tensor {tensor.name} is {tensor.dtype}, want F32", "MODEL")
    return struct.unpack(f"<{len(data) // 4}f", data)


def _llama3(factors: Sequence[float], rotating: int, theta: float) -> dict[str, Any] | None:
    """Returns the scaling by which frequencies are divided by these factors: none, or Llama 3's."""
    if all(factor == 1.0 for factor in factors):
        return None
    scaling = {"rope_type": "llama3", "factor": float(f"{max(factors):.5g}"), **LLAMA3}
    low, high, trained = LLAMA3.values()
    for place, found in enumerate(factors):
        turns = trained / (2 * math.pi * theta ** (2 * place / rotating))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        wanted = 1 / ((1 - smooth) / max(factors) + smooth)
        if len(factors) != rotating // 2 or not math.isclose(found, wanted, rel_tol=1e-4):
            raise UnsupportedModelError(
                f"GGUF: {LLAMA3_FACTORS} has {found:g} at {place}, where Llama 3's rule makes {wanted:g}: others "
                "are not read",
                "MODEL",
            )
    return scaling
