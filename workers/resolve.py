"""What settings and a checkpoint decide together: the model's facts, its context, the type it is computed in.

Torch-free. Asked by the launcher before Ray starts (cluster/preflight.py), by coordinator and gateway
(workers/build.py) and by the ranks (workers/rank/loading.py), so that all of them refuse the same in the same words.
"""

import hashlib
import json
from pathlib import Path
from typing import Final

from configs.errors import SettingsError, UnsupportedModelError
from configs.schema import EngineSettings
from workers.models.registry import load_spec
from workers.models.spec import ArchSpec

SAMPLE_BYTES = 2**16
SAMPLES = 16
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


def read_spec(settings: EngineSettings) -> ArchSpec:
    """The model's facts, or a SettingsError: no such folder, unsupported architecture, not to be cut so."""
    folder = Path(settings.model.model)
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder with a model", "MODEL")
    try:
        spec = load_spec(folder, settings.model.hf_overrides or None)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(str(error), error.flag or "MODEL") from error
    spec.check_parallel(settings.parallel.tensor_parallel_size, settings.parallel.pipeline_parallel_size)
    return spec


def resolve_max_model_len(settings: EngineSettings, spec: ArchSpec) -> int:
    """The context that one sequence may fill: asked for, never above the model's own. Tokens."""
    asked, own = settings.model.max_model_len, spec.max_position_embeddings
    if asked is not None and not 1 <= asked <= own:
        raise SettingsError(f"--max-model-len {asked} is outside 1..{own}, the model's context", "--max-model-len")
    return asked or own


def resolve_dtype(settings: EngineSettings, spec: ArchSpec, device: str) -> str:
    """--dtype, or the checkpoint's own; float16 checkpoints run as bfloat16 on CPU, where float16 matmul is slow
    (512 x 1024 x 3072: 61 ms against 3.5 ms on a Zen 5). `device` is "cpu" or "cuda"; a key of DTYPE_BYTES."""
    name: str = settings.model.dtype
    if name == "auto":
        name = spec.torch_dtype or "float32"
        if name == "float16" and device == "cpu":
            name = "bfloat16"
    if name not in DTYPE_BYTES:
        raise SettingsError(f"the checkpoint's dtype {name} is not one that can be computed in", "--dtype")
    return name


def resolve_kv_dtype(settings: EngineSettings, dtype: str) -> str:
    """--kv-cache-dtype without aliases; `dtype` is the model's, resolved."""
    name = settings.cache.kv_cache_dtype
    return {"auto": dtype, "fp8": "fp8_e4m3"}.get(name, name)


def fingerprint(folder: Path, settings: EngineSettings) -> str:
    """Names the weights by content, for KV that outlives this process: config.json, and of each safetensors file its
    size and evenly spread samples (all of it when it is small): fine-tunes of one model differ nearly everywhere."""
    model = settings.model
    digest = hashlib.blake2b(digest_size=16)
    overrides = json.dumps(model.hf_overrides, sort_keys=True)
    dummy = model.seed if model.load_format == "dummy" else None
    digest.update(f"{model.revision}|{overrides}|{dummy}|".encode())
    digest.update((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as data:
            for sample in range(SAMPLES):
                data.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()
