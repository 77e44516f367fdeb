"""Whether a source holds an adapter of this model: read and checked whole, without torch, before anybody may list it.

Called on a thread of cluster/adapters/desk.py, by the launcher and by `tandem adapters add`. Imported only where
adapters are served.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.adapters.entries import BaseFacts
from cluster.adapters.sources import is_url, modules_of
from configs.environment import cache_folder
from configs.errors import SettingsError, TandemError
from configs.schema import ServiceSettings
from workers.adapter_source import remote_digest
from workers.models.registry import load_spec
from workers.models.spec import ArchSpec
from workers.peft_folder import adapter_facts, most_file_bytes

CACHE = "adapters"
"""Below the cache folder; ranks of this machine find there what was checked here."""


class AdapterChecker:
    """Checks sources against one base model."""

    def __init__(self, spec: ArchSpec, max_rank: int) -> None:
        self._spec = spec
        self._max_rank = max_rank

    def __call__(self, source: str) -> str:
        """The digest of what lies there. TandemError with the reason when it cannot be served."""
        folder = Path(source)
        if is_url(source):
            cache = cache_folder() / CACHE
            most_bytes = most_file_bytes(self._spec, self._max_rank)
            folder = cache / remote_digest(source, cache, most_bytes=most_bytes)
        return adapter_facts(folder, self._spec, self._max_rank).digest


def checker_of(base: BaseFacts) -> AdapterChecker:
    """For the model that a service announced. SettingsError when its folder cannot be read here."""
    overrides: Mapping[str, Any] | None = base.overrides or None
    return AdapterChecker(load_spec(base.folder, overrides), base.max_rank)


def base_facts(settings: ServiceSettings) -> BaseFacts:
    """Of settings whose model is a folder."""
    model = settings.engine.model
    return BaseFacts(
        folder=model.model,
        max_rank=settings.engine.lora.max_lora_rank,
        overrides=dict(model.hf_overrides),
        names=tuple(model.served_model_name),
    )


def check_modules(settings: ServiceSettings) -> list[str]:
    """Checks every --lora-modules, before anything is started; a line for each. SettingsError names the flag."""
    check = checker_of(base_facts(settings))
    lines = []
    for name, source in modules_of(settings.adapters, settings.engine.model.served_model_name):
        try:
            lines.append(f"adapter {name}@{check(source)[:12]} from {source}")
        except TandemError as error:
            raise SettingsError(f"{name}: {error}", "--lora-modules") from error
    return lines
