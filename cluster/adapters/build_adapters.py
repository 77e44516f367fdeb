"""Builds one gateway's adapters (or a batch run's) from its settings: the list, the service, what runs beside requests.

Called by cluster/gateway/app/gateway_replica.py and `tandem run-batch`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.folder_watch import FolderWatch, Sightings
from tandem.cluster.adapters.sources import Module, modules_digest, modules_of
from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import Commands, RedisUnavailable
from tandem.configs.schema import ServiceSettings

log = logging.getLogger("tandem.adapters")
SAVE_PERIOD_S = 1.0


async def open_adapter_service(
    settings: ServiceSettings,
    redis: Commands | None,
    service: str,
    limit: Callable[[str], int | None] = lambda tenant: None,
) -> AdapterService | None:
    """Opens the AdapterService, with what is durable and --lora-modules listed; None without --enable-lora. `settings`
    are resolved; limit: how many adapters a tenant may have. SettingsError for a module that cannot be served."""
    if not settings.engine.lora.enable_lora:
        return None
    from tandem.cluster.adapters.checks import base_facts, checker_of  # numpy: only where adapters are served

    names, facts = settings.engine.model.served_model_name, base_facts(settings)
    state_dir = settings.gateway.state_dir if redis is not None else None
    adapters = AdapterList(redis, names[0], Path(state_dir) if state_dir is not None else None)
    adapters.announce(facts)
    await adapters.load()
    adapter_service = AdapterService(adapters, checker_of(facts), names, limit=limit)
    with suppress(RedisUnavailable):
        await adapters.refresh()
    await _list_new_modules(adapter_service, modules_of(settings.adapters, names), service)
    return adapter_service


async def _list_new_modules(adapter_service: AdapterService, modules: list[Module], service: str) -> None:
    """Lists --lora-modules, unless a gateway of the service has listed the same before. SettingsError."""
    adapters = adapter_service.adapters
    digest = modules_digest(adapters.model, modules)
    if not await adapters.modules_are_listed(service, digest):
        await adapter_service.list_modules(modules)
        await adapters.note_modules_listed(service, digest)


def start_adapter_tasks(
    adapter_service: AdapterService,
    settings: ServiceSettings,
    redis: Commands,
    service: str,
    changes: Announcements = Announcements(),
) -> "list[asyncio.Task[None]]":
    """Starts the tasks of an AdapterService: they follow the list and --lora-watch-dir, and save to --state-dir.
    The caller cancels them."""
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(adapter_service.adapters.run(lambda: _say(adapter_service), changes=changes), name="adapters")
    ]
    if settings.adapters.watch_dir is not None:
        watch = FolderWatch(Path(settings.adapters.watch_dir), adapter_service, Sightings(redis, service))
        tasks.append(loop.create_task(watch.run(), name="adapters' folder"))
    if settings.gateway.state_dir is not None:
        tasks.append(loop.create_task(_keep_saved(adapter_service.adapters), name="saving adapters"))
    return tasks


async def _keep_saved(adapters: AdapterList) -> None:
    """Saves the list each second until it is cancelled."""
    while True:
        await adapters.save()
        await asyncio.sleep(SAVE_PERIOD_S)


def _say(adapter_service: AdapterService) -> None:
    log.info("%d adapters are listed", len(adapter_service.adapters.entries))
