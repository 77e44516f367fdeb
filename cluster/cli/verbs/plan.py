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

from tandem.cluster.cli.base.flags import with_service_options
from tandem.cluster.cli.base.plan_report import report
from tandem.cluster.cli.base.planned_model import PlannedModel, planned_model
from tandem.cluster.cli.base.terminal import say
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import OPTIONS
from tandem.configs.platform_facts import idle_flags
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.parallel.stored.headers import INDEX, find_weights, has_other_weights, no_weights, weight_files
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.family_rows.families import parameters_of
from tandem.workers.planning.planner import GroupPlan, best_of, layouts
from tandem.workers.planning.stored_model import open_checkpoint

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


def _find(name: str, settings: EngineSettings, asked: _Asked) -> dict[str, Any]:
    """Computes the result as the JSON object that `--json` prints."""
    model = planned_model(name, settings, asked.device_memory_gib, asked.host_tier_gib, asked.disk_tier_gib)
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


def _hint(model: PlannedModel) -> str | None:
    """Returns a line on what is faster on this machine's CPU."""
    from tandem.configs.environment import lacks_bf16_products
    from tandem.configs.platform_facts import PLATFORM_FACTS, W8A8_HELPS

    is_dense = model.dtype == "bfloat16" and not model.spec.weights.schemes
    can_change = "w8a8" in PLATFORM_FACTS[model.memory.device].quantizations
    if not can_change or not is_dense or not lacks_bf16_products():
        return None
    return f"This CPU multiplies no pairs of bf16: {W8A8_HELPS}."


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
