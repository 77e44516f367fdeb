"""What can be known to fail before Ray starts: each check raises SettingsError with the value and the flag.

Called by the launcher and by `tandem check-config`, on resolved settings (model is a folder).
"""

import socket
from pathlib import Path

from msgspec.structs import replace

from cluster import machine
from cluster.coordination.client import check_reachable
from cluster.placement import max_groups
from configs.errors import SettingsError, UnsupportedModelError
from configs.load import no_gpu_share
from configs.schema import CacheSettings, ServiceSettings
from workers.models.registry import load_spec
from workers.models.spec import ArchSpec


def choose_device(settings: ServiceSettings) -> ServiceSettings:
    """Fills in the device: cuda when the driver offers one, else cpu."""
    asked, gpus = settings.engine.device.device, machine.cuda_device_count()
    if asked == "cuda" and gpus == 0:
        raise SettingsError("cuda: this machine offers no CUDA device", "--device")
    chosen = asked or ("cuda" if gpus else "cpu")
    cache = settings.engine.cache
    if chosen == "cpu" and cache.gpu_memory_utilization != CacheSettings().gpu_memory_utilization:
        raise no_gpu_share()
    device = replace(settings.engine.device, device=chosen)
    return replace(settings, engine=replace(settings.engine, device=device))


def check_model(settings: ServiceSettings) -> ArchSpec:
    """The model is of a known architecture, and can be cut the way it is asked."""
    model, parallel = settings.engine.model, settings.engine.parallel
    folder = Path(model.model)
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{folder} holds no config.json", "MODEL")
    try:
        spec = load_spec(folder, model.hf_overrides or None)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(str(error), error.flag or "MODEL") from error
    if model.load_format == "safetensors" and not any(folder.glob("*.safetensors")):
        raise SettingsError(f"{folder} holds no .safetensors file", "MODEL")
    spec.check_parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    asked = model.max_model_len
    if asked is not None and asked > spec.max_position_embeddings:
        raise SettingsError(
            f"{asked} is beyond the model's {spec.max_position_embeddings} positions", "--max-model-len"
        )
    return spec


def check_memory(settings: ServiceSettings) -> None:
    """On CPU: the weights of all groups and the KV pools that were asked for fit in what is free."""
    if settings.engine.device.device != "cpu":
        return
    groups, ranks = max_groups(settings), settings.engine.parallel.ranks_per_group
    weights = sum(file.stat().st_size for file in Path(settings.engine.model.model).glob("*.safetensors"))
    free = machine.available_memory_bytes()
    if weights * groups > free:
        flag = "--data-parallel-size" if groups > 1 else "MODEL"
        raise SettingsError(f"{groups} x {_gib(weights)} of weights do not fit the free {_gib(free)}", flag)
    asked = (settings.engine.cache.kv_cache_memory_bytes or 0) * ranks * groups
    if weights * groups + asked > free:
        raise SettingsError(
            f"{_gib(asked)} of KV on {ranks * groups} ranks and {_gib(weights * groups)} of weights "
            f"do not fit the free {_gib(free)}",
            "--kv-cache-memory-bytes",
        )


def check_port(host: str, port: int) -> None:
    """The port can be bound now. (Whoever takes it in the next seconds is reported by the gateway.)"""
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
    """Redis answers at the URL."""
    reason = check_reachable(url)
    if reason is not None:
        raise SettingsError(f"{_without_password(url)} does not answer: {reason}", "--redis-url")


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if rest else url


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.0f} MiB"
