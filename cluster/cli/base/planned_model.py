"""PlannedModel: a model and the memory to plan for, as `tandem plan` and `tandem simulate` read them: from config.json
and file headers. Torch-free."""

from dataclasses import dataclass

from msgspec.structs import replace

from tandem.configs.errors import SettingsError
from tandem.configs.platform_facts import check_formats, sized
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.planning.budget import GIB, available_bytes, check_offload
from tandem.workers.planning.hub import Wanted
from tandem.workers.planning.invariance import check_batch_invariant
from tandem.workers.planning.model_source import find_model, of_draft
from tandem.workers.planning.planner import GroupPlan, Memory, plan_group
from tandem.workers.planning.resolve import (
    check_weights,
    read_spec,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_model_len,
)

CONFIG = Wanted(("config.json",))


@dataclass(frozen=True, slots=True)
class PlannedModel:
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


def planned_model(
    name: str,
    settings: EngineSettings,
    device_memory_gib: float | None,
    host_tier_gib: float = 0.0,
    disk_tier_gib: float = 0.0,
) -> PlannedModel:
    """Finds the model and resolves the settings that depend on it. device_memory_gib: None: this machine's.
    SettingsError."""
    folder = find_model(name, settings.model.revision, "MODEL", CONFIG)
    draft = of_draft(_config_here, settings.model.draft)
    settings = replace(settings, model=replace(settings.model, model=str(folder), draft=draft))
    spec, memory = read_spec(settings), memory_of(settings, device_memory_gib, host_tier_gib, disk_tier_gib)
    check_formats(settings, memory.device)
    check_weights(spec, memory.device)
    settings = sized(settings, memory.device, memory.device_bytes)
    check_batch_invariant(settings, spec, memory.device)
    dtype = resolve_dtype(settings, spec, memory.device)
    kv_dtype = resolve_kv_dtype(settings, dtype)
    return PlannedModel(settings, spec, memory, dtype, kv_dtype, resolve_max_model_len(settings, spec))


def memory_of(
    settings: EngineSettings, device_memory_gib: float | None, host_tier_gib: float, disk_tier_gib: float
) -> Memory:
    """Returns the memory to plan for: of --device-memory, else this machine's. SettingsError when there is no CUDA
    device, and for flags that this machine has no use for."""
    from tandem.cluster.deploy import devices

    device, size = devices.device_memory(settings.device.device)
    if device_memory_gib is not None:
        size = int(device_memory_gib * GIB)
    elif size is None:
        raise SettingsError("there is no CUDA device here to ask; say how many GiB one has", "--device-memory")
    else:
        check_offload(settings.device.cpu_offload_gib, host_bytes=0, ranks_on_node=1)
    return Memory(
        device=device,
        device_bytes=size,
        host_bytes=available_bytes() if device_memory_gib is None else None,
        host_tier_bytes=int(host_tier_gib * GIB),
        disk_tier_bytes=int(disk_tier_gib * GIB),
    )
