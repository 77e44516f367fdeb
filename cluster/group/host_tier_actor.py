"""HostTierKeeper: an actor on a node that keeps its host-tier process, whose memory for KV outlives groups.

Coordinators ask for one on their node by the service and the size of its tier, and the first makes it; a group that
Serve puts there later finds what an earlier one left. It ends, with the memory, when no group has used it for LEASE_S:
after `serve delete`, say. `tandem serve` without --address starts such a process itself (service/launcher.py).
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.ray_private.ray_facts import session_folder
from tandem.cluster.wire.identity import NAMESPACE
from tandem.configs.errors import SettingsError
from tandem.offload.host.host_process import HOST_TIER_SHARE, HostProcess, HostTierError, status
from tandem.workers.planning.budget import available_bytes

log = logging.getLogger("ray.serve.tandem")
LEASE_S, LOOK_S, CALL_S = 600.0, 5.0, 30.0


class HostTierKeeper:
    """The actor. budget_bytes: of all regions on this node, or less where the node has less. Made on an event loop."""

    def __init__(
        self, name: str, budget_bytes: int, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = self._place() / f"h-{name}"
        self._budget_bytes = min(budget_bytes, int(HOST_TIER_SHARE * available_bytes()))
        self._process: HostProcess | None = None
        self._lease_s, self._clock = lease_s, clock
        self._used_s = clock()
        self._changing = asyncio.Lock()
        self._keeping = asyncio.get_running_loop().create_task(self._keep(), name="host tier")

    async def socket(self) -> str:
        """Returns the path of the process's socket; starts it if it does not run. SettingsError if it does not start,
        or this node has no memory for it."""
        async with self._changing:
            self._used_s = self._clock()
            await self._start()
            assert self._process is not None
            return str(self._process.socket_path)

    async def end(self) -> None:
        """Ends the process. Memory that groups still use is theirs until they end."""
        async with self._changing:
            if self._process is not None:
                await asyncio.to_thread(self._process.stop)
            with suppress(OSError):
                shutil.rmtree(self._folder)

    async def look(self) -> bool:
        """Starts the process again if it has died, and notes whether a group uses it. Returns whether the lease is
        over."""
        async with self._changing:
            if self._process is not None:
                with suppress(SettingsError, HostTierError):
                    await self._start()
                    if (await asyncio.to_thread(status, self._process.socket_path, 1.0)).users:
                        self._used_s = self._clock()
        return self._clock() - self._used_s >= self._lease_s

    async def _start(self) -> None:
        if self._process is None or not self._process.is_alive():
            process = HostProcess(self._folder, self._budget_bytes)
            await asyncio.to_thread(process.start)
            self._process = process

    async def _keep(self) -> None:
        while not await self.look():
            await asyncio.sleep(LOOK_S)
        log.info("no group has used the host tier of this node for %.0f s: it ends", self._lease_s)
        await self.end()
        self._exit()

    def _exit(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor)

    def _place(self) -> Path:
        """A folder that outlives every actor, with a short path: a socket's must be."""
        return session_folder()


def node_host_tiers(service: str, budget_bytes: int, nodes: Mapping[str, str]) -> dict[str, str] | None:
    """Returns the sockets of a service's host-tier processes, each on its node, which are started where there is none;
    None, with a line in the log, where one cannot be had. nodes: their Ray ids, by address. Blocks."""
    asked = {address: _keeper(service, budget_bytes, node).socket.remote() for address, node in nodes.items()}
    try:
        return dict(zip(asked, ray.get([*asked.values()], timeout=CALL_S), strict=True))
    except Exception as error:  # Ray has several types for an actor that cannot be reached
        log.warning("the host tier cannot be had: %s", str(error).strip().splitlines()[-1])
        return None


def _keeper(service: str, budget_bytes: int, node: str) -> Any:
    name = f"{service[:6]}-{budget_bytes >> 20}"  # another size is another process
    return (
        ray.remote(HostTierKeeper)
        .options(
            name=f"{prefix(service)}{node}:{name}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # not in the placement group of the coordinator that asks
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(name, budget_bytes)
    )


def end_host_tiers(service: str) -> None:
    """Ends the host tiers of a service on all nodes. Ray's errors when it cannot be asked."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix(service)):
            with suppress(ValueError, ray.exceptions.RayError):  # gone meanwhile
                keeper: Any = ray.get_actor(actor["name"], namespace=NAMESPACE)
                ray.get(keeper.end.remote(), timeout=CALL_S)
                ray.kill(keeper)


def prefix(service: str) -> str:
    """Returns how the names of a service's actors begin."""
    return f"tandem-host-tier:{service}:"
