"""The settings of a service with absolute paths, and with the model's folder in place of its name.

The launcher calls resolve_settings() before it changes its working folder, cluster/app.py for `serve run`.
"""

from pathlib import Path

from msgspec.structs import replace

from tandem.cluster.adapters.sources import resolved as resolved_adapters
from tandem.configs.schema import EngineSettings, ServiceSettings
from tandem.workers.planning.model_source import resolve_model


def resolve_settings(settings: ServiceSettings) -> ServiceSettings:
    """Resolves settings: every path is absolute (model, tokenizer, template, logs, disk, state, certificates,
    adapters), the model is a folder, served_model_name is set and revision is None. Raises SettingsError with the flag
    to change.
    """
    model = resolve_model(settings.engine.model)
    step_log = str(Path(settings.engine.step_log).absolute()) if settings.engine.step_log is not None else None
    cache = settings.engine.cache
    if cache.kv_disk_path is not None:
        cache = replace(cache, kv_disk_path=str(Path(cache.kv_disk_path).expanduser().absolute()))
    engine: EngineSettings = replace(settings.engine, model=model, step_log=step_log, cache=cache)
    gateway = replace(
        settings.gateway,
        state_dir=_absolute(settings.gateway.state_dir),
        ssl_certfile=_absolute(settings.gateway.ssl_certfile),
        ssl_keyfile=_absolute(settings.gateway.ssl_keyfile),
        ssl_ca_certs=_absolute(settings.gateway.ssl_ca_certs),
    )
    logs = replace(settings.logs, dir=_absolute(settings.logs.dir))
    adapters = resolved_adapters(settings.adapters)
    return replace(settings, engine=engine, gateway=gateway, adapters=adapters, logs=logs)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())
