"""`tandem plan MODEL`: the memory that a model needs, and how much KV fits, from config.json and file headers.

workers/planning/planner.py computes the plan. This module reads flags and the machine's memory, and prints the result
(base/plan_report.py) or JSON. Torch-free.
"""

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from tandem.cluster.cli.base.flags import with_service_options
from tandem.cluster.cli.base.plan_report import report
from tandem.cluster.cli.base.terminal import say
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import OPTIONS
from tandem.configs.platform_facts import check_formats, idle_flags, sized
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.parallel.stored.headers import INDEX, find_weights, has_other_weights, no_weights, weight_files
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.planning.budget import GIB, available_bytes, check_offload
from tandem.workers.planning.hub import Wanted
from tandem.workers.planning.invariance import check_batch_invariant
from tandem.workers.planning.model_source import find_model, of_draft
from tandem.workers.planning.planner import GroupPlan, Memory, best_of, layouts, plan_group
from tandem.workers.planning.resolve import (
    check_weights,
    read_spec,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
)
from tandem.workers.planning.stored_model import open_checkpoint

CONFIG = Wanted(("config.json",))
PLANNED = {
    "revision", "dtype", "quantization", "batch_invariant", "enforce_eager", "max_model_len", "hf_overrides",
    "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel",
    "gpu_memory_utilization", "kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size",
    "disable_hybrid_kv_cache_manager",
    "max_num_seqs", "max_num_batched_tokens", "device", "cpu_offload_gb", "enable_lora", "max_loras", "max_lora_rank",
    "max_cpu_loras", "lora_memory_bytes", "speculative_config",
}  # fmt: skip


def _own(flag: str, metavar: str, words: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=words, show_default=False)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The values of the flags that only this verb has. num_ranks: None is tensor times pipeline parallel size."""

    device_memory_gib: float | None
    host_tier_gib: float
    disk_tier_gib: float
    num_ranks: int | None


@with_service_options(leave_out=frozenset(option.name for option in OPTIONS) - PLANNED)
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub id, or `demo` (the bundled model).")],
    ranks: Annotated[
        int | None,
        _own("--ranks", "N", "Number of ranks to find the best TP x PP for. Default: -tp times -pp."),
    ] = None,
    device_memory: Annotated[
        float | None,
        _own("--device-memory", "X", "GiB of each GPU, or of the machine on CPU. Default: that of this machine."),
    ] = None,
    kv_offloading_size: Annotated[
        float, _own("--kv-offloading-size", "X", "GiB of host memory per group for KV. Default: 0.")
    ] = 0.0,
    kv_disk_size: Annotated[float, _own("--kv-disk-size", "X", "GiB of disk per group for KV. Default: 0.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Compute the memory that MODEL needs and the KV that fits.

    Reads only config.json and the headers of the weights. Prints bytes of weights, KV, adapters and activations per
    rank; tokens of KV on device, host and disk, and what windows save; with --enable-lora, the memory for adapters; the
    best TP x PP for --ranks. The exit status is 1 when the model does not fit.
    """
    from tandem.cluster.deploy import devices

    asked = _Asked(device_memory, kv_offloading_size, kv_disk_size, ranks)
    _check(asked)
    settings = build_settings(model, flags)
    device, _ = devices.device_memory(settings.engine.device.device)
    for line in dict.fromkeys([*settings.without_effect, *idle_flags(settings.engine, device)]):
        say(line)
    found = _find(model, settings.engine, asked)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    else:
        typer.echo(report(found), nl=False)
    sys.exit(0 if found["plan"]["fits"] else 1)


def _check(asked: _Asked) -> None:
    sizes = {"--kv-offloading-size": asked.host_tier_gib, "--kv-disk-size": asked.disk_tier_gib}
    for flag, value in sizes.items():
        if not 0 <= value < 2**20:
            raise SettingsError(f"{value:g} must be at least 0", flag)
    if asked.device_memory_gib is not None and not 0 < asked.device_memory_gib < 2**20:
        raise SettingsError(f"{asked.device_memory_gib:g} must be above 0", "--device-memory")
    if asked.num_ranks is not None and not 1 <= asked.num_ranks <= 4096:
        raise SettingsError(f"{asked.num_ranks} must be from 1 to 4096", "--ranks")


@dataclass(frozen=True, slots=True)
class _PlannedModel:
    """A model and the memory to plan for, with resolved types and context length."""

    settings: EngineSettings
    spec: ArchSpec
    memory: Memory
    dtype: str
    kv_dtype: str
    max_model_len: int

    def plan(self, tp_size: int, pp_size: int) -> GroupPlan:
        parallel = replace(self.settings.parallel, tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)
        settings = replace(self.settings, parallel=parallel)
        return plan_group(settings, self.spec, self.memory, self.dtype, self.kv_dtype, self.max_model_len)


def _config_here(model: ModelSettings) -> ModelSettings:
    """Returns the settings of a model with the folder of its config. SettingsError."""
    here: ModelSettings = replace(model, model=str(find_model(model.model, model.revision, "MODEL", CONFIG)))
    return here


def _model(name: str, settings: EngineSettings, asked: _Asked) -> _PlannedModel:
    """Finds the model and resolves the settings that depend on it. SettingsError."""
    folder = find_model(name, settings.model.revision, "MODEL", CONFIG)
    draft = of_draft(_config_here, settings.model.draft)
    settings = replace(settings, model=replace(settings.model, model=str(folder), draft=draft))
    spec, memory = read_spec(settings), _memory(settings, asked)
    check_formats(settings, memory.device)
    check_weights(spec, memory.device)
    settings = sized(settings, memory.device, memory.device_bytes)
    check_batch_invariant(settings, spec, memory.device)
    dtype = resolve_dtype(settings, spec, memory.device)
    kv_dtype = resolve_kv_dtype(settings, dtype)
    return _PlannedModel(settings, spec, memory, dtype, kv_dtype, resolve_max_model_len(settings, spec))


def _find(name: str, settings: EngineSettings, asked: _Asked) -> dict[str, Any]:
    """Computes the result as the JSON object that `--json` prints."""
    model = _model(name, settings, asked)
    spec, given = model.spec, model.settings.parallel
    num_ranks = asked.num_ranks or given.ranks_per_group
    found = layouts(spec, num_ranks, expert_parallel=given.enable_expert_parallel)
    candidates = [model.plan(*layout) for layout in found]
    best = best_of(candidates)
    stored = _stored(model.settings.model, spec, is_own=Path(name).expanduser().is_dir())
    return {
        "model": name,
        "architecture": spec.architecture,
        "num_layers": spec.num_layers,
        "num_parameters": parameters_of(spec).num_elements,
        "dtype": model.dtype,
        "quantization": spec.weights.words or None,
        "kv_dtype": model.kv_dtype,
        "lora": msgspec.structs.asdict(model.settings.lora),
        "checkpoint": None if stored is None else _checkpoint(stored, spec),
        "memory": asdict(model.memory),
        "max_num_seqs": model.settings.scheduler.max_num_seqs,
        "max_num_batched_tokens": model.settings.scheduler.max_num_batched_tokens,
        "plan": _plain(model.plan(given.tensor_parallel_size, given.pipeline_parallel_size)),
        "hint": _hint(model),
        "num_ranks": num_ranks,
        "cuts": [_plain(candidate) for candidate in candidates],
        "best": None if best is None else {"tp_size": best.tp_size, "pp_size": best.pp_size},
    }


def _hint(model: _PlannedModel) -> str | None:
    """Returns a line on what is faster on this machine's CPU."""
    from tandem.configs.environment import lacks_bf16_products
    from tandem.configs.platform_facts import PLATFORM_FACTS, W8A8_HELPS

    is_dense = model.dtype == "bfloat16" and not model.spec.weights.schemes
    can_change = "w8a8" in PLATFORM_FACTS[model.memory.device].quantizations
    if not can_change or not is_dense or not lacks_bf16_products():
        return None
    return f"This CPU multiplies no pairs of bf16: {W8A8_HELPS}."


def _memory(settings: EngineSettings, asked: _Asked) -> Memory:
    """The memory to plan for: of --device-memory, else this machine's. SettingsError when there is no CUDA device, and
    for flags that this machine has no use for."""
    from tandem.cluster.deploy import devices

    device, size = devices.device_memory(settings.device.device)
    if asked.device_memory_gib is not None:
        size = int(asked.device_memory_gib * GIB)
    elif size is None:
        raise SettingsError("there is no CUDA device here to ask; say how many GiB one has", "--device-memory")
    else:
        check_offload(settings.device.cpu_offload_gib, host_bytes=0, ranks_on_node=1)
    return Memory(
        device=device,
        device_bytes=size,
        host_bytes=available_bytes() if asked.device_memory_gib is None else None,
        host_tier_bytes=int(asked.host_tier_gib * GIB),
        disk_tier_bytes=int(asked.disk_tier_gib * GIB),
    )


def _stored(model: ModelSettings, spec: ArchSpec, *, is_own: bool) -> StoredCheckpoint | None:
    """The checkpoint, checked as ranks would check it; None for a config.json alone, and for a model of the hub (not
    is_own) whose files are not all here. SettingsError when ranks could not load it."""
    folder = Path(model.model)
    names = [path.name for path in folder.iterdir()]
    if not weight_files(folder) and INDEX not in names:
        if has_other_weights(names):
            raise no_weights(str(folder), names)
        return None
    if not is_own and not all(file.exists() for file in find_weights(folder)[0]):
        return None
    return open_checkpoint(folder, spec, model.hf_overrides)


def _checkpoint(stored: StoredCheckpoint, spec: ArchSpec) -> dict[str, Any]:
    sizes: Counter[str] = Counter()
    for tensor in stored.tensors:
        sizes[tensor.dtype] += tensor.nbytes
    return {
        "num_files": len(stored.files),
        "total_bytes": sum(sizes.values()),
        "bytes_by_dtype": dict(sizes),
        "num_elements": sum(tensor.num_elements for tensor in stored.tensors),
        "num_parameters": parameters_of(spec).num_elements,
        "quantized_with": spec.weights.method,
    }


def _plain(plan: GroupPlan) -> dict[str, Any]:
    """A GroupPlan as JSON data, with sums for one rank of each stage."""
    return {
        "tp_size": plan.tp_size,
        "pp_size": plan.pp_size,
        "max_model_len": plan.max_model_len,
        "fits": plan.fits,
        "stages": [
            {
                "stage": stage.stage,
                "num_layers": stage.weights.num_layers,
                "weight_bytes": stage.weights.total_bytes,
                "device_weight_bytes": stage.device_weight_bytes,
                "host_weight_bytes": stage.placement.host_bytes,
                "streamed_layers": len(stage.placement.streamed),
                "activation_bytes": stage.activation_bytes,
                "graph_bytes": stage.graph_bytes,
                "draft_bytes": stage.draft_bytes,
                "draft_bytes_per_token": stage.draft_token_bytes,
                "kv_bytes_per_token": stage.kv_layers_bytes,
                "kv_budget_bytes": stage.kv_budget_bytes,
                "adapter_bytes": stage.adapter_bytes,
                "adapter_page_bytes": stage.adapter_room.page_bytes,
                "adapter_pages": stage.adapter_room.num_pages,
                "adapter_device_bytes": stage.adapter_room.device_bytes,
                "adapter_copy_bytes": stage.adapter_room.copy_bytes,
                "adapter_host_bytes": stage.adapter_room.host_bytes,
            }
            for stage in plan.stages
        ],
        "tiers": [asdict(tier) for tier in plan.tiers],
        "problems": [asdict(problem) for problem in plan.problems],
        "notes": list(plan.notes),
        "kv_windows": list(plan.kv_groups.windows),
        "kv_tokens_kept_whole": plan.tokens_kept_whole,
    }
