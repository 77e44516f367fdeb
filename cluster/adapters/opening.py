"""The adapters of one gateway (or of one batch run), from its settings: the list, the desk, what runs beside requests.

Called by cluster/gateway_replica.py and `tandem run-batch`.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cluster.adapters.desk import AdapterDesk
from cluster.adapters.kept import AdapterFile
from cluster.adapters.registry import AdapterRegistry
from cluster.adapters.sources import modules_of
from cluster.adapters.watch import FolderWatch
from cluster.coordination.changes import Announcements, NoAnnouncements
from cluster.coordination.client import Commands, RedisAway
from configs.schema import ServiceSettings

log = logging.getLogger("tandem.adapters")


async def open_desk(
    settings: ServiceSettings,
    redis: Commands | None,
    service: str,
    limit: Callable[[str], int | None] = lambda tenant: None,
) -> AdapterDesk | None:
    """The desk, with what is durable and --lora-modules listed; None without --enable-lora. `settings` are resolved;
    limit: how many adapters a tenant may have. SettingsError for a module that cannot be served."""
    if not settings.engine.lora.enable_lora:
        return None
    from cluster.adapters.checks import base_facts, checker_of  # numpy: only where adapters are served

    names, facts = settings.engine.model.served_model_name, base_facts(settings)
    registry = AdapterRegistry(redis, names[0])
    registry.announce(facts)
    state_dir = settings.gateway.state_dir if redis is not None else None
    kept = AdapterFile(Path(state_dir), registry) if state_dir is not None else None
    if kept is not None:
        await kept.load()
    desk = AdapterDesk(registry, checker_of(facts), names, limit=limit, kept=kept)
    with suppress(RedisAway):
        await registry.refresh()
    if not await registry.modules_are_listed(service):
        await desk.list_modules(modules_of(settings.adapters, names))
        await registry.note_modules_listed(service)
    return desk


def tend(
    desk: AdapterDesk,
    settings: ServiceSettings,
    changes: Announcements = NoAnnouncements(),
) -> "list[asyncio.Task[None]]":
    """What keeps the desk up to date: looks at the list and at --lora-watch-dir, saves to --state-dir.
    The caller cancels them."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(desk.registry.run(lambda: _say(desk), changes=changes), name="adapters")]
    if settings.adapters.watch_dir is not None:
        watch = FolderWatch(Path(settings.adapters.watch_dir), desk)
        tasks.append(loop.create_task(watch.run(), name="adapters' folder"))
    if desk.kept is not None:
        tasks.append(loop.create_task(desk.kept.run(), name="saving adapters"))
    return tasks


def _say(desk: AdapterDesk) -> None:
    log.info("%d adapters are listed", len(desk.registry.entries))
