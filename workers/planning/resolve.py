"""Resolves settings that depend on the checkpoint: the model's spec, its context length, its data types. Torch-free.

Called by the launcher before Ray starts (cluster/deploy/preflight.py), by coordinator and gateway (workers/build.py)
and by the ranks (workers/rank/loading.py), so that all of them raise the same errors.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Final

from tandem.configs.errors import SettingsError, UnsupportedModelError
from tandem.configs.platform_facts import PLATFORM_FACTS
from tandem.configs.schema import Device, EngineSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.parallel.mesh import Mesh
from tandem.parallel.stored.headers import weight_files
from tandem.workers.models.spec.arch import ArchSpec, RopeKind, RopeSpec
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.models.spec.config.draft_config import read_draft
from tandem.workers.models.spec.config.head_config import HeadSpec
from tandem.workers.models.spec.config.pooling_config import PoolingFacts, read_pooling
from tandem.workers.models.spec.family_rows.families import family_of
from tandem.workers.models.spec.kv_layout import kv_windows
from tandem.workers.models.spec.weights.fields import UNQUANTIZED

SAMPLE_BYTES = 2**16
SAMPLES = 16
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
YARN_KEYS: Final = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
"""Numbers that yarn scales by, beside its factor; a field of RopeSpec each."""


def read_spec(settings: EngineSettings) -> ArchSpec:
    """Reads the model's spec. SettingsError for a missing folder, an unsupported architecture, or a TP x PP that does
    not divide the model."""
    folder = Path(settings.model.model)
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder with a model", "MODEL")
    try:
        spec = load_spec(folder, settings.model.hf_overrides or None, settings.model.quantization)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(str(error), error.flag or "MODEL") from error
    parallel = settings.parallel
    spec.check_parallel(
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
    )
    return spec.for_context(settings.model.max_model_len or spec.max_position_embeddings)


def draft_spec(settings: EngineSettings) -> ArchSpec | HeadSpec | None:
    """Returns the spec of the draft model or the head of --speculative-config, None without one. Raises as read_draft()
    does."""
    model, drafts = settings.model, settings.speculative
    if model.draft is None or drafts is None:
        return None
    overrides, draft = json.dumps(model.hf_overrides, sort_keys=True), model.draft
    return read_draft(model.model, model.quantization, overrides, drafts.method, draft.model, draft.quantization)


def drafts_here(mesh: Mesh) -> bool:
    """Returns whether the rank at `mesh` runs the draft model, which is whole there: the first of the last stage."""
    return mesh.tp_rank == 0 and mesh.pp_rank == mesh.pp_size - 1


def pooling_facts(settings: EngineSettings) -> PoolingFacts:
    """Return how the model makes embeddings. Raises as read_pooling() does."""
    model = settings.model
    size = read_spec(settings).hidden_size
    return read_pooling(Path(model.model), size, model.hf_overrides, model.pooler_config)


def resolve_max_model_len(settings: EngineSettings, spec: ArchSpec) -> int:
    """The context length in tokens: --max-model-len, else the model's own. SettingsError when it is above that."""
    asked, own = settings.model.max_model_len, spec.max_position_embeddings
    if asked is not None and not 1 <= asked <= own:
        words = f"--max-model-len {asked} is outside 1..{own}, the model's context"
        raise SettingsError(words + _longer(asked, spec), "--max-model-len")
    return asked or own


def _longer(asked: int, spec: ArchSpec) -> str:
    """Words on how a model trained with fewer positions gets a context of `asked` tokens, or that it cannot."""
    if asked < 1:
        return ""
    own = spec.max_position_embeddings
    if not spec.ropes:
        return "; it cannot be made longer, as the model has no rotary positions that could be scaled"
    # a rope of layers with a window needs no scaling, and is not given any by the parameters of one rope
    whole = [layer.position for layer in spec.layers if layer.position and layer.params.window is None]
    rope = whole[0] if whole else spec.ropes[0]
    if rope.kind is RopeKind.LONGROPE:
        return "; it cannot be made longer, as longrope's factors are those of this context"
    scaled = family_of(spec.architecture).rotary.positions_scaled
    trained = rope.trained_context or own
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": math.ceil(asked / trained * 4) / 4}
    if scaled or rope.kind is not RopeKind.DEFAULT:
        scaling["original_max_position_embeddings"] = trained
    if rope.kind is RopeKind.YARN:
        scaling |= {key: getattr(rope, key) for key in YARN_KEYS if getattr(rope, key) != getattr(RopeSpec(), key)}
    overrides = {"rope_scaling": scaling} | ({"max_position_embeddings": asked} if scaled else {})
    return (
        "; positions that it was not trained for need scaling, at some loss of quality: --hf-overrides "
        f"'{json.dumps(overrides)}'"
    )


def check_weights(spec: ArchSpec, device: Device) -> None:
    """Checks that a device multiplies the weights as the checkpoint has them. SettingsError."""
    if spec.weights.method is not None and not PLATFORM_FACTS[device].quantizations:
        raise SettingsError(
            f"the checkpoint is quantized with {spec.weights.method} ({spec.weights.words}), which ranks with --device "
            f"{device} do not multiply; --device cpu does, or {UNQUANTIZED}",
            "MODEL",
        )


def kv_groups(settings: EngineSettings, spec: ArchSpec, max_model_len: int) -> KVGroups:
    """The groups of layers with KV block tables of their own; one group with --disable-hybrid-kv-cache-manager."""
    windows: tuple[int | None, ...] = (None,)
    if not settings.cache.disable_hybrid_kv_cache_manager:
        draft = draft_spec(settings)
        layers = () if draft is None else draft.layers
        if not layers or settings.parallel.tensor_parallel_size == 1:  # else the model's are split, and these whole
            windows = kv_windows(spec, max_model_len, layers)
    in_flight = settings.steps_in_flight * settings.scheduler.max_num_batched_tokens
    return KVGroups(settings.cache.block_size, windows, in_flight)


def resolve_dtype(settings: EngineSettings, spec: ArchSpec, device: Device) -> str:
    """The dtype of weights and activations, a key of DTYPE_BYTES: --dtype, else the checkpoint's, or what a device
    computes it as. SettingsError for a dtype that is not supported."""
    name, facts = str(settings.model.dtype), PLATFORM_FACTS[device]
    if name == "auto":
        name = spec.torch_dtype or "float32"
        name = facts.computed_as.get(name, name)
    if name not in facts.dtypes:
        raise SettingsError(f"the checkpoint's dtype {name} is not one that can be computed in", "--dtype")
    return name


def resolve_kv_dtype(settings: EngineSettings, dtype: str) -> str:
    """The dtype of the KV cache without aliases. dtype: the model's, from resolve_dtype."""
    name = settings.cache.kv_cache_dtype
    return {"auto": dtype, "fp8": "fp8_e4m3"}.get(name, name)


def fingerprint(folder: Path, settings: EngineSettings) -> str:
    """A hex digest that identifies the weights, for KV that outlives this process; those of a draft model too. It
    covers config.json and, of each safetensors file, the size and evenly spaced samples: fine-tunes of one model differ
    nearly everywhere."""
    model = settings.model
    digest = hashlib.blake2b(digest_size=16)
    overrides = json.dumps(model.hf_overrides, sort_keys=True)
    dummy = (model.seed or 0) if model.load_format == "dummy" else None
    spec = read_spec(settings)
    digest.update(f"{model.revision}|{overrides}|{dummy}|{spec.weights.digest()}".encode())
    if model.batch_invariant:  # KV of the other mode has other bits
        digest.update(b"batch-invariant")
    digest.update((folder / "config.json").read_bytes())
    if spec.short_factors:  # --max-model-len changes what keys are rotated by
        digest.update(repr(spec.ropes).encode())
    _add_weights(digest, folder)
    if model.draft is not None:  # its KV lies in the same blocks
        digest.update(f"draft|{model.draft.revision}|{model.draft.quantization}|".encode())
        digest.update((Path(model.draft.model) / "config.json").read_bytes())
        _add_weights(digest, Path(model.draft.model))
    return digest.hexdigest()


def _add_weights(digest: "hashlib.blake2b", folder: Path) -> None:
    """Adds the sizes and samples of a folder's safetensors files."""
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}|{size}|".encode())
        with file.open("rb") as data:
            for sample in range(SAMPLES):
                data.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(data.read(SAMPLE_BYTES))
