"""The settings of a service as every machine understands them, and with this machine's folders in them.

pin_settings() comes first, before the launcher changes its working folder, and in cluster/app.py under `serve run`.
What it returns travels to gateways, coordinators and ranks, each of which finds the model on its own machine.
"""

from pathlib import Path

from msgspec.structs import replace

from tandem.cluster.adapters.sources import resolved as resolved_adapters
from tandem.configs.schema import EngineSettings, ServiceSettings
from tandem.workers.planning.model_source import engine_here, pin_model

SEEDS_NOTHING = (
    "--seed {} has no effect: it makes no request repeatable, as requests are drawn for at the same time, by several "
    "gateways in a service; send a `seed` with each request that is to be written the same way again"
)


def resolve_settings(settings: ServiceSettings) -> ServiceSettings:
    """Resolves settings for this machine: pin_settings() and settings_here()."""
    return settings_here(pin_settings(settings))


def settings_here(settings: ServiceSettings, *, weights: bool = True) -> ServiceSettings:
    """Returns pinned settings with this machine's folders of the model, as model_here() does."""
    here: ServiceSettings = replace(settings, engine=engine_here(settings.engine, weights=weights))
    return here


def pin_settings(settings: ServiceSettings) -> ServiceSettings:
    """Resolves what holds on every machine: every path is absolute (model, tokenizer, template, logs, disk, state,
    certificates, adapters), a model of the hub has the commit that is meant as its revision, and served_model_name is
    set. Raises SettingsError with the flag to change.
    """
    model = pin_model(settings.engine.model)
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
    adapters, lines = resolved_adapters(settings.adapters), settings.without_effect
    if model.seed is not None and model.load_format != "dummy":
        lines = tuple(dict.fromkeys([*lines, SEEDS_NOTHING.format(model.seed)]))
    return replace(settings, engine=engine, gateway=gateway, adapters=adapters, logs=logs, without_effect=lines)


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).expanduser().absolute())
