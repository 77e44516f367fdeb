"""Checks of the settings before Ray starts. Each raises SettingsError with the value and the flag to change.

The launcher and `tandem check-config` call those that read the model with this machine's settings (it is a folder).
"""

import asyncio
import socket
from pathlib import Path

from msgspec.structs import replace

from tandem.cluster.deploy import devices
from tandem.cluster.deploy.placement import max_groups
from tandem.cluster.state.durable_map import Reading
from tandem.cluster.state.redis_client import CLUSTER_MODE, BackgroundClient, RedisUnavailable, check_reachable
from tandem.cluster.tenants.store import TenantStore
from tandem.cluster.tenants.tenant import Tenant
from tandem.configs.errors import SettingsError
from tandem.configs.platform_facts import CPU, PLATFORM_FACTS, check_device, idle_flags, sized
from tandem.configs.schema import Device, ParallelSettings, ServiceSettings
from tandem.configs.secrets import without_password
from tandem.offload.host.host_process import HOST_TIER_SHARE
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.planning.adapter_room import adapter_room
from tandem.workers.planning.budget import available_bytes, check_offload
from tandem.workers.planning.invariance import check_batch_invariant
from tandem.workers.planning.resolve import (
    DTYPE_BYTES,
    check_weights,
    draft_spec,
    drafts_here,
    pooling_facts,
    read_spec,
    resolve_dtype,
    resolve_max_model_len,
)
from tandem.workers.planning.sizes import draft_bytes, rank_weights
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.text.generation_config import generation_of

RANK_BYTES, COORDINATOR_BYTES = 250 * 2**20, 100 * 2**20
"""Resident memory of an idle process of each kind (torch, Ray), as `make bench-startup` measures it."""


def choose_device(settings: ServiceSettings) -> ServiceSettings:
    """Sets the device where it is not given: cuda when the driver has a device, else cpu."""
    asked, gpus = settings.engine.device.device, devices.cuda_device_count()
    if asked == "cuda" and gpus == 0:
        raise SettingsError("cuda: this machine offers no CUDA device", "--device")
    chosen: Device = asked or ("cuda" if gpus else "cpu")
    return with_device(settings, chosen, devices.device_memory(chosen)[1])


def with_device(settings: ServiceSettings, chosen: Device, memory: int | None) -> ServiceSettings:
    """Sets the device to `chosen`, with the sizes of steps that it has memory for, and notes the flags that mean
    nothing on it. memory: bytes of one, None where they are not known. Raises SettingsError for a setting that asks for
    what it has not."""
    check_device(settings.engine, chosen)
    device = replace(settings.engine.device, device=chosen)
    noted = dict.fromkeys([*settings.without_effect, *idle_flags(settings.engine, chosen)])
    engine = sized(replace(settings.engine, device=device), chosen, memory)
    return replace(settings, engine=engine, without_effect=tuple(noted))


def check_model(settings: ServiceSettings, *, weights: bool = True) -> ArchSpec:
    """Checks that the model has a known architecture and just the weights of it, by their headers, and defaults of
    sampling, can be sharded as requested, and fits --max-model-len. Its texts are check_text()'s. Returns its spec.
    weights: they are on this machine."""
    model = settings.engine.model
    spec = read_spec(settings.engine)
    device = settings.engine.device.device or "cpu"
    check_weights(spec, device)
    check_batch_invariant(settings.engine, spec, device)
    if weights and model.load_format != "dummy":
        open_checkpoint(Path(model.model), spec, model.hf_overrides)
    resolve_max_model_len(settings.engine, spec)
    pooling_facts(settings.engine)
    generation_of(model)
    return spec


def check_labels(settings: ServiceSettings, *, private: bool) -> None:
    """Checks that selectors of labels select among nodes. private: the service has a Ray of its own, of one node."""
    if settings.gateway.label_selector:
        raise SettingsError("the gateways of `tandem serve` are on its own node", "--gateway-label-selector")
    if private and settings.engine.parallel.label_selector:
        raise SettingsError("needs --address: a private Ray has one node, without labels", "--label-selector")


def check_adapters(settings: ServiceSettings) -> list[str]:
    """Checks that every adapter of --lora-modules can be served with the model. Returns a line for each."""
    if not settings.adapters.modules:
        return []
    from tandem.cluster.adapters.checks import check_modules  # numpy: only where adapters are served

    return check_modules(settings)


def cpu_weight_bytes(
    spec: ArchSpec,
    dtype: str,
    parallel: ParallelSettings = ParallelSettings(),
) -> int:
    """Bytes of one group's weights on CPU, over all its ranks, in the dtype that is computed in."""
    element, packs = DTYPE_BYTES[dtype], dtype in CPU.packs
    return sum(rank_weights(spec, mesh, element, packs).total_bytes for mesh in _meshes(parallel))


def _meshes(parallel: ParallelSettings) -> list[Mesh]:
    """The mesh of each rank of a group."""
    tp_size, pp_size = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    experts = parallel.enable_expert_parallel
    return [Mesh(tp_size, pp_size, rank, experts) for rank in range(parallel.ranks_per_group)]


def check_memory(settings: ServiceSettings, elsewhere: int | None = None) -> None:
    """Checks that host memory suffices. On CPU: for the weights of all groups, KV pools of a given size and host copies
    of adapters. On any device: for weights that --cpu-offload-gb keeps there. elsewhere: bytes of other machines that
    all groups are on; None: they are on this one."""
    if elsewhere is None:
        check_offload(settings.engine.device.cpu_offload_gib, host_bytes=0, ranks_on_node=1)
    if (device := settings.engine.device.device) is None or not PLATFORM_FACTS[device].shares_memory:
        return
    groups, ranks = max_groups(settings), settings.engine.parallel.ranks_per_group
    spec = read_spec(settings.engine)
    dtype = resolve_dtype(settings.engine, spec, device)
    weights = cpu_weight_bytes(spec, dtype, settings.engine.parallel)
    (guesses,) = (mesh for mesh in _meshes(settings.engine.parallel) if drafts_here(mesh))
    weights += draft_bytes(draft_spec(settings.engine), spec, guesses, DTYPE_BYTES[dtype], dtype in CPU.packs)
    free = available_bytes() if elsewhere is None else elsewhere
    if weights * groups > free:
        raise SettingsError(
            f"{groups} x {_gib(weights)} of weights in {dtype} do not fit the free {_gib(free)}",
            _more_groups(settings) if groups > 1 else "MODEL",
        )
    asked = (settings.engine.cache.kv_cache_memory_bytes or 0) * ranks * groups
    if weights * groups + asked > free:
        on = "1 rank" if ranks * groups == 1 else f"{ranks * groups} ranks"
        raise SettingsError(
            f"{_gib(asked)} of KV on {on} and {_gib(weights * groups)} of weights do not fit the free {_gib(free)}",
            "--kv-cache-memory-bytes",
        )
    _check_copies(settings, spec, dtype, free - weights * groups - asked)


def check_processes(settings: ServiceSettings) -> None:
    """Checks on CPU that the idle processes of all groups fit in free memory."""
    groups, ranks = max_groups(settings), settings.engine.parallel.ranks_per_group
    needed, free = groups * (COORDINATOR_BYTES + ranks * RANK_BYTES), available_bytes()
    if (device := settings.engine.device.device) and PLATFORM_FACTS[device].shares_memory and needed > free:
        raise SettingsError(
            f"the processes of {groups} group(s) of {ranks} rank(s) need about {_gib(needed)} before any weights, "
            f"of which {_gib(free)} are free",
            _more_groups(settings) if groups > 1 else "--tensor-parallel-size",
        )


def _more_groups(settings: ServiceSettings) -> str:
    return "--data-parallel-size" if settings.autoscaling_config is None else "autoscaling_config"


def _check_copies(settings: ServiceSettings, spec: ArchSpec, dtype: str, free: int) -> None:
    """Checks that --max-cpu-loras adapters, each of --max-lora-rank, fit in `free` bytes of host memory."""
    lora, parallel = settings.engine.lora, settings.engine.parallel
    rooms = [adapter_room(lora, spec, mesh, DTYPE_BYTES[dtype]) for mesh in _meshes(parallel)]
    groups, of_each = max_groups(settings), sum(room.copy_bytes for room in rooms)
    if lora.max_cpu_loras * groups * of_each <= free:
        return
    most = free // (groups * of_each)
    remedy = f"--max-cpu-loras {most} would do" if most else "nothing is left for any"
    raise SettingsError(
        f"{lora.max_cpu_loras} adapters in host memory, up to {_gib(of_each)} each at --max-lora-rank "
        f"{lora.max_lora_rank}, for each of {groups} group(s), do not fit the {_gib(free)} that weights and KV leave "
        f"free; {remedy}",
        "--max-cpu-loras",
    )


def fit_host_tier(settings: ServiceSettings) -> tuple[ServiceSettings, str | None]:
    """Drops the KV tiers below the device when host memory is too small. Returns the settings and a warning if so."""
    cache = settings.engine.cache
    if cache.kv_offloading_gib is None:
        return settings, None
    groups = max_groups(settings)
    wanted, free = int(cache.kv_offloading_gib * groups * 2**30), available_bytes()
    if wanted <= HOST_TIER_SHARE * free:
        return settings, None
    smaller = replace(cache, kv_offloading_gib=None, kv_disk_path=None, kv_disk_gib=None)
    engine = replace(settings.engine, cache=smaller)
    return replace(settings, engine=engine), (
        f"--kv-offloading-size {cache.kv_offloading_gib:g}: {_gib(wanted)} for {groups} group(s) is more than "
        f"{HOST_TIER_SHARE:.0%} of the free {_gib(free)}; serving without tiers below the device"
    )


def check_port(host: str, port: int) -> None:
    """Checks that the port can be bound now. The gateway reports a port that is taken after this check."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror as error:
        raise SettingsError(f"{host} is not an address of this machine", "--host") from error
    except OSError as error:
        reason = "is in use" if error.errno in (98, 48) else f"cannot be used: {error.strerror}"
        raise SettingsError(f"port {port} on {host} {reason}", "--port") from error


def check_redis(url: str) -> None:
    """Checks that Redis answers at the URL."""
    reason = check_reachable(url)
    if reason is not None:
        raise SettingsError(f"{without_password(url)} does not answer: {reason}", "--redis-url")


def note_on_redis(url: str) -> str | None:
    """A line for a Redis that does not answer now, and may later. Raises SettingsError for one that never will: it is
    in cluster mode."""
    reason = check_reachable(url)
    if reason == CLUSTER_MODE:
        raise SettingsError(f"{without_password(url)}: {reason}", "redis_url")
    return None if reason is None else f"{without_password(url)} does not answer: {reason}"


def note_on_keys(settings: ServiceSettings, redis_url: str) -> str | None:
    """A line for a service that has no key for requests and answers 401 until there is a tenant, or since it once had
    one, else None."""
    gateway = settings.gateway
    if gateway.api_keys or (reading := asyncio.run(_tenants(redis_url))) is None or reading.values:
        return None
    if gateway.admin_keys:
        return (
            "every request needs a key, and there is only --admin-api-key, which may do anything: "
            "`tandem tenants add NAME` makes one for requests (or --api-key)"
        )
    if not gateway.is_open(listens_itself=True):
        return "every request needs a key, and there is none yet: `tandem tenants add NAME` makes one (or --api-key)"
    if reading.epoch.id is not None:
        return "this service had keys before and stays closed: `tandem tenants add NAME` makes one (or --api-key)"
    return None


async def _tenants(redis_url: str) -> Reading[Tenant] | None:
    redis = BackgroundClient(redis_url, timeout_s=10.0, retries=0)
    try:
        return await TenantStore(redis).read()
    except RedisUnavailable:
        return None
    finally:
        await redis.close()


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"
