"""Checks a source: does it hold an adapter of this model? Read whole, without torch, before anybody may list it.

Called on a thread of cluster/adapters/adapter_service.py, by the launcher and by `tandem adapters add`. Imported only
where adapters are served.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.cluster.adapters.entries import BaseFacts
from tandem.cluster.adapters.sources import modules_of
from tandem.configs.environment import adapter_cache_folder
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.schema import ServiceSettings
from tandem.workers.lora.peft.adapter_check import AdapterChecker
from tandem.workers.models.spec.config.config_reader import load_spec


def checker_of(base: BaseFacts) -> AdapterChecker:
    """The checker for the model that a service announced. SettingsError when its folder cannot be read here."""
    overrides: Mapping[str, Any] | None = base.overrides or None
    folder = Path(base.folder)
    has_weights = base.has_weights and any(folder.glob("*.safetensors"))
    spec = load_spec(base.folder, overrides)
    return AdapterChecker(spec, base.max_rank, folder if has_weights else None, adapter_cache_folder())


def base_facts(settings: ServiceSettings) -> BaseFacts:
    """The facts of settings whose model is a folder."""
    model = settings.engine.model
    return BaseFacts(
        folder=model.model,
        max_rank=settings.engine.lora.max_lora_rank,
        overrides=dict(model.hf_overrides),
        names=tuple(model.served_model_name),
        has_weights=model.load_format != "dummy",
    )


def check_modules(settings: ServiceSettings) -> list[str]:
    """Checks every --lora-modules, before anything is started; a line for each. SettingsError names the flag."""
    check = checker_of(base_facts(settings))
    lines = []
    for name, source in modules_of(settings.adapters, settings.engine.model.served_model_name):
        try:
            lines.append(f"adapter {name}@{check(source)[:12]} from {source}")
        except TandemError as error:
            raise SettingsError(f"{name}: {source}: {error}", "--lora-modules") from error
    return lines
