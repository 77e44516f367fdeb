"""`tandem plan MODEL`: what a model needs and what fits, from config.json and file headers alone. Loads no torch.

The arithmetic is workers/planning.py's; here are flags, the machine's memory, and words.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from cluster.commands.options import with_service_options
from cluster.commands.plan_report import report
from configs.errors import SettingsError
from configs.load import build_settings
from configs.options import OPTIONS
from configs.schema import Device, EngineSettings

PLANNED = {
    "revision", "dtype", "max_model_len", "hf_overrides", "tensor_parallel_size", "pipeline_parallel_size",
    "gpu_memory_utilization", "kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size",
    "max_num_seqs", "max_num_batched_tokens", "device", "cpu_offload_gb", "enable_lora", "max_loras", "max_lora_rank",
    "max_cpu_loras", "lora_memory_bytes",
}  # fmt: skip
with_planned_options: Callable[[Callable[..., None]], Callable[..., None]] = partial(
    with_service_options, leave_out=frozenset(option.name for option in OPTIONS) - PLANNED
)
GIB = 2**30
CONFIG_FILES = ["config.json"]


def _own(flag: str, metavar: str, words: str) -> Any:
    """A flag of this verb."""
    return typer.Option(flag, metavar=metavar, help=words, show_default=False)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What only this verb takes."""

    device_memory_gib: float | None
    host_tier_gib: float
    disk_tier_gib: float
    num_ranks: int | None


@with_planned_options
def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or `demo`.")],
    ranks: Annotated[
        int | None,
        _own("--ranks", "N", "Propose the best TP x PP for this many ranks. Default: those of -tp and -pp."),
    ] = None,
    device_memory: Annotated[
        float | None,
        _own("--device-memory", "X", "GiB of each GPU, or of the machine on CPU. Default: what is here."),
    ] = None,
    kv_offloading_size: Annotated[
        float, _own("--kv-offloading-size", "X", "GiB of host memory for KV, of the whole group. Default: 0.")
    ] = 0.0,
    kv_disk_size: Annotated[
        float, _own("--kv-disk-size", "X", "GiB of disk for KV, of the whole group. Default: 0.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Say what MODEL needs and what fits, unloaded.

    Weights, KV, adapters and activations in bytes; tokens of KV on device, host and disk; with --enable-lora, what is
    set aside for adapters; the best way to cut it over --ranks. Exit status 1 when it does not fit.
    """
    asked = _Asked(device_memory, kv_offloading_size, kv_disk_size, ranks)
    _check(asked)
    found = _find(model, build_settings(model, flags).engine, asked)
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
class _Question:
    """All that a plan is made of, but for the cut."""

    settings: EngineSettings
    spec: Any
    memory: Any
    dtype: str
    kv_dtype: str
    max_model_len: int

    def plan_of(self, tp_size: int, pp_size: int) -> Any:
        from workers.planning import plan_group

        parallel = replace(self.settings.parallel, tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size)
        settings = replace(self.settings, parallel=parallel)
        return plan_group(settings, self.spec, self.memory, self.dtype, self.kv_dtype, self.max_model_len)


def _question(name: str, settings: EngineSettings, asked: _Asked) -> _Question:
    """Finds the model and resolves what depends on it."""
    from cluster.models_source import find_model
    from workers.resolve import read_spec, resolve_dtype, resolve_kv_dtype, resolve_max_model_len

    folder = find_model(name, settings.model.revision, "MODEL", CONFIG_FILES)
    settings = replace(settings, model=replace(settings.model, model=str(folder)))
    spec, memory = read_spec(settings), _memory(settings, asked)
    dtype = resolve_dtype(settings, spec, memory.device)
    kv_dtype = resolve_kv_dtype(settings, dtype)
    return _Question(settings, spec, memory, dtype, kv_dtype, resolve_max_model_len(settings, spec))


def _find(name: str, settings: EngineSettings, asked: _Asked) -> dict[str, Any]:
    """All that is printed, as plain data."""
    from workers.models.checkpoint_facts import read_checkpoint_facts
    from workers.planning import best_of, cuts

    question = _question(name, settings, asked)
    spec, given = question.spec, question.settings.parallel
    num_ranks = asked.num_ranks or given.ranks_per_group
    candidates = [question.plan_of(*cut) for cut in cuts(spec, num_ranks)]
    best = best_of(candidates)
    facts = read_checkpoint_facts(Path(question.settings.model.model))
    return {
        "model": name,
        "architecture": spec.architecture,
        "num_layers": spec.num_layers,
        "num_parameters": spec.num_parameters,
        "dtype": question.dtype,
        "kv_dtype": question.kv_dtype,
        "lora": msgspec.structs.asdict(question.settings.lora),
        "checkpoint": None if facts is None else _checkpoint(facts, spec.num_parameters),
        "memory": asdict(question.memory),
        "plan": _plain(question.plan_of(given.tensor_parallel_size, given.pipeline_parallel_size)),
        "num_ranks": num_ranks,
        "cuts": [_plain(candidate) for candidate in candidates],
        "best": None if best is None else {"tp_size": best.tp_size, "pp_size": best.pp_size},
    }


def _memory(settings: EngineSettings, asked: _Asked) -> Any:
    """The memory to plan for: as given, else this machine's."""
    from cluster import machine
    from workers.planning import Memory
    from workers.rank.memory import available_bytes

    here = machine.cuda_memory_bytes()
    device: Device = settings.device.device or ("cpu" if here is None else "cuda")
    if asked.device_memory_gib is not None:
        size = int(asked.device_memory_gib * GIB)
    elif device == "cpu":
        size = available_bytes()
    elif here is not None:
        size = here
    else:
        raise SettingsError("there is no CUDA device here to ask; say how many GiB one has", "--device-memory")
    return Memory(
        device=device,
        device_bytes=size,
        host_bytes=available_bytes() if asked.device_memory_gib is None else None,
        host_tier_bytes=int(asked.host_tier_gib * GIB),
        disk_tier_bytes=int(asked.disk_tier_gib * GIB),
    )


def _checkpoint(facts: Any, num_parameters: int) -> dict[str, Any]:
    return {
        "num_files": facts.num_files,
        "total_bytes": facts.total_bytes,
        "bytes_by_dtype": facts.bytes_by_dtype,
        "num_elements": sum(facts.elements.values()),
        "num_parameters": num_parameters,
    }


def _plain(plan: Any) -> dict[str, Any]:
    """A GroupPlan with the sums that its readers want, per rank of each stage."""
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
                "kv_bytes_per_token": stage.kv_token_bytes,
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
    }
