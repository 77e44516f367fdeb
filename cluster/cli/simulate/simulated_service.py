"""The groups of a service, as `tandem simulate` reads them from its settings: blocks, context, adapters, tiers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from tandem.cluster.cli.base.planned_model import planned_model
from tandem.cluster.cli.base.terminal import say
from tandem.cluster.simulator.simulated_group import GroupKind
from tandem.cluster.simulator.simulated_ranks import END, VOCAB_SIZE
from tandem.configs.errors import SettingsError
from tandem.configs.load import PRESETS, build_settings, merge_config, read_serve_file
from tandem.configs.schema import ServiceSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.executor import ExecutorReady

SUFFIXES: Final = (".yaml", ".yml")


def read_service(file: str, flags: Mapping[str, Any]) -> ServiceSettings:
    """Reads the settings of a service: of a file for `tandem serve --config`, a preset, a Ray Serve file with one
    application of ours, or a model. flags: win over those of a file, but not over a Ray Serve file's. SettingsError."""
    is_file = Path(file).suffix in SUFFIXES or (PRESETS / f"{file}.yaml").exists()
    if not is_file:
        return build_settings(file, flags)
    services = read_serve_file(file)
    if not services:
        return merge_config(file, None, flags)
    if len(services) > 1:
        raise SettingsError(f"{file} has {len(services)} applications, and one can be simulated", "FILE")
    if flags:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in flags)
        raise SettingsError(f"{file} is a Ray Serve file, which says all settings itself: {names}", "FILE")
    return services[0]


def group_kind(settings: ServiceSettings, device_memory_gib: float | None, adapter_s: float) -> GroupKind:
    """Returns what the service's groups have. SettingsError for a model that does not fit, and for settings that are
    not simulated: their result would say nothing of the service."""
    engine = settings.engine
    _refuse_unsimulated(settings)
    host_gib = engine.cache.kv_offloading_gib or 0.0
    model = planned_model(engine.model.model, engine, device_memory_gib, host_gib)
    engine, tp_size = model.settings, engine.parallel.tensor_parallel_size
    plan = model.plan(tp_size, 1)
    for problem in plan.problems:
        raise SettingsError(problem.message, problem.flag)
    (stage,) = plan.stages
    block_bytes = stage.kv_token_bytes * engine.cache.block_size * tp_size
    num_blocks, host = plan.tiers[0].size_bytes // block_bytes, plan.tiers[1].size_bytes // block_bytes
    room = stage.adapter_room
    ready = ExecutorReady(
        num_blocks=num_blocks,
        pipeline_parallel_size=1,
        device=model.memory.device,
        dtype=model.dtype,
        threads=0,
        weight_bytes=stage.device_weight_bytes,
        block_bytes=block_bytes,
        load_s=0.0,
        kv_dtype=model.kv_dtype,
        adapter_pages=room.num_pages,
    )
    facts = ModelFacts(model.max_model_len, VOCAB_SIZE, (END,), "simulated", model.kv_dtype, plan.kv_groups)
    pages = max(1, room.copy_bytes // max(1, room.page_bytes))
    quiet = msgspec.structs.replace(engine, step_log=None)
    return GroupKind(
        settings=quiet, facts=facts, ready=ready, host_slots=host, adapter_pages=pages, adapter_s=adapter_s
    )


def _refuse_unsimulated(settings: ServiceSettings) -> None:
    """SettingsError for what the simulated ranks do not do."""
    engine = settings.engine
    if (stages := engine.parallel.pipeline_parallel_size) > 1:
        raise SettingsError(f"{stages}: stages beside each other are not simulated", "--pipeline-parallel-size")
    if engine.speculative is not None:
        raise SettingsError(f"{engine.speculative.method}: drafts are not simulated", "--speculative-config")
    if engine.cache.kv_disk_path is not None:
        raise SettingsError(f"{engine.cache.kv_disk_path}: a disk tier is not simulated", "--kv-disk-path")
    if engine.step_log is not None:
        say(f"--step-log {engine.step_log} of the service is not written: nothing is computed")
