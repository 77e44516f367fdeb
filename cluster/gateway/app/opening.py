"""Opens what a gateway has from its start to its end: its port, and the place of its tenants."""

import socket
from collections.abc import Callable
from pathlib import Path

from tandem.cluster.state.notifications import Announcements
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.tenant_service import TenantService
from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.configs.environment import short_temp_folder
from tandem.configs.errors import SettingsError
from tandem.configs.schema import ServiceSettings

BACKLOG = 2048


def listen(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket; `shared` lets several gateways of one node share the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def open_tenants(
    settings: ServiceSettings,
    facts: ServiceFacts,
    redis: BackgroundClient,
    kv_tokens: Callable[[], int],
    changes: Announcements,
) -> TenantService:
    """The tenants of a gateway of these settings. SettingsError when their folder cannot be used."""
    given = settings.gateway.state_dir
    try:
        # one for all gateways of a service on a node, so that each takes up what another leaves behind
        folder = Path(given) if given is not None else short_temp_folder() / f"tl-{facts.service_id}"
        timeout_s = settings.redis.timeout_ms / 1000
        return TenantService(redis, settings.gateway, folder, timeout_s, kv_tokens, changes)
    except OSError as error:
        raise SettingsError(f"{given} cannot be used: {error.strerror}", "--state-dir") from error
