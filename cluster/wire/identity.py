"""Identity of an application under Serve over its versions: the service's id, its secret, and its private Redis.

A named detached actor outside the application has them, so a redeploy, which restarts every replica, finds them again.
Replicas join by the application's name, and renew a lease for as long as they live; without a renewal for LEASE_S the
actor ends itself and its Redis. `tandem serve` makes facts with an identity of its own, and has no such actor.

Ray restarts an actor that dies with the same id and secret, which are its arguments; its Redis takes up what is left of
its folder, and gateways restore the rest.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import replace
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.ray_private.ray_facts import ON_HEAD, session_folder
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.wire.private_redis import PrivateRedis
from tandem.cluster.wire.service_facts import ServiceFacts, new_identity
from tandem.configs.limits import ANY_PORTS, Ports

log = logging.getLogger("ray.serve.tandem")
NAMESPACE = "tandem"
LEASE_S = 600.0
"""The identity ends when no replica renews it for that long: after `serve delete` or `shutdown`, or a failed deploy."""
RENEW_PERIOD_S = 30.0
CALL_S = 20.0
LOOPBACK = "127.0.0.1"


class ServiceIdentity:
    """The actor. Its arguments are the identity; one that exists already keeps its own. Its lease runs from the start:
    one that Ray restarts when nobody is left ends, too. Made on the event loop."""

    def __init__(
        self, service_id: str, secret: str, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service_id = service_id
        self._secret = secret
        self._lease_s = lease_s
        self._clock = clock
        self._renewed_s = clock()
        self._redis: PrivateRedis | None = None
        self._url_of_settings: str | None = None
        self._changing = asyncio.Lock()
        self._has_ended = False
        loop = asyncio.get_running_loop()
        self._ending = loop.create_task(self._end_unrenewed(), name="identity's lease")

    async def renew(self) -> tuple[str, str]:
        """Renews the lease. Returns id and secret. RuntimeError once the identity has ended."""
        self._check_lives()
        self._renewed_s = self._clock()
        return self._service_id, self._secret

    async def note_redis(self, url: str | None) -> None:
        """Notes where the replicas have found Redis: a URL of the settings, None for the private one."""
        self._url_of_settings = url

    async def whereabouts(self) -> tuple[str, str | None]:
        """The service's id and the URL of its Redis, for who asks from outside; None: no replica has said it yet."""
        return self._service_id, self._url_of_settings or (None if self._redis is None else self._redis.url)

    async def redis_url(self, on_loopback: bool, ports: Ports = ANY_PORTS) -> str:
        """The URL of the private Redis, which the first call starts, on one of these ports. on_loopback: all who use it
        are on this machine; a server that is only for those is started again on the node's address when another asks.
        RuntimeError once the identity has ended."""
        async with self._changing:
            self._check_lives()
            if self._redis is not None and self._redis.host == LOOPBACK and not on_loopback:
                await self._redis.stop(keep_data=True)
                self._redis = None
            if self._redis is None or not self._redis.is_kept:
                host = LOOPBACK if on_loopback else ray.util.get_node_ip_address()
                self._redis = PrivateRedis(self._folder(), host, ports)
                await self._redis.start()
            return self._redis.url

    async def end(self) -> None:
        """Ends the Redis server and removes its data; calls are refused from now on."""
        self._has_ended = True
        async with self._changing:
            if self._redis is not None:
                await self._redis.stop(keep_data=False)
                self._redis = None
            with suppress(OSError):
                shutil.rmtree(self._folder())

    def is_over(self) -> bool:
        """True when nobody has renewed the lease for too long."""
        return self._clock() - self._renewed_s >= self._lease_s

    def _folder(self) -> Path:
        """A folder in that of Ray's session, which outlives every actor. Its name is short: a socket's path must be."""
        return session_folder() / f"r-{self._service_id[:6]}"

    async def _end_unrenewed(self) -> None:
        while not self.is_over():
            await asyncio.sleep(self._lease_s / 20)
        log.warning("no replica of service %s for %.0f s: its identity ends", self._service_id, self._lease_s)
        try:
            await self.end()
        except Exception:
            log.exception("the data of service %s may be left in %s", self._service_id, self._folder())
        self._exit()

    def _exit(self) -> None:
        ray.kill(ray.get_runtime_context().current_actor)

    def _check_lives(self) -> None:
        if self._has_ended:
            raise RuntimeError(f"the identity of service {self._service_id} has ended")


class Membership:
    """A replica's part in its service: who it is, and where the private Redis is.

    app: the application's name. facts: of the replica's start, whose identity stays the replica's for its whole life.
    """

    def __init__(self, app: str, facts: ServiceFacts) -> None:
        self._app = app
        self.facts = facts
        self._renewing: asyncio.Task[None] | None = None

    async def join(self) -> ServiceFacts:
        """Returns the facts with the service's identity. Ray's errors when its actor cannot be reached."""
        if not self.facts.service_id:
            service_id, secret = await self._ask(self._renew_at)
            self.facts = replace(self.facts, service_id=service_id, secret=secret)
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), name="identity's lease")
        return self.facts

    async def open_redis(self, timeout_s: float = 2.0, retries: int = 6) -> BackgroundClient:
        """Opens the service's Redis: the one of the facts, else the private one, which may move."""
        if self.facts.redis_url is not None:
            return BackgroundClient(self.facts.redis_url, timeout_s, retries)
        return BackgroundClient(await self._redis_url(), timeout_s, retries, self._redis_url)

    def leave(self) -> None:
        """Renews no more."""
        if self._renewing is not None:
            self._renewing.cancel()

    async def _redis_url(self) -> str:
        asked = (self.facts.single_node, *([self.facts.ports] if self.facts.ports != ANY_PORTS else []))
        return str(await self._ask(lambda actor: actor.redis_url.remote(*asked)))

    async def _ask(self, call: Callable[[Any], Any]) -> Any:
        """Calls the actor, which is made, also again, when there is none."""
        actor = await asyncio.to_thread(identity_actor, self._app, self.facts)
        async with asyncio.timeout(CALL_S):
            return await call(actor)

    async def _renew_at(self, actor: Any) -> Any:
        with suppress(AttributeError):  # one that an older release has made
            actor.note_redis.remote(self.facts.redis_url)
        return await actor.renew.remote()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_PERIOD_S)
            try:
                service_id, _ = await self._ask(self._renew_at)
            except Exception as error:  # Ray has several types for an actor that is gone or being restarted
                log.warning("the service's identity was not renewed: %s", str(error).partition("\n")[0])
                continue
            if service_id != self.facts.service_id:
                log.error("this replica is of service %s, and %s has its name", self.facts.service_id, service_id)


def identity_name(app: str) -> str:
    """The name of an application's actor in NAMESPACE."""
    return f"tandem-identity:{app}"


def identity_actor(app: str, facts: ServiceFacts, lease_s: float = LEASE_S) -> Any:
    """The handle of the application's identity. Without one it is made: with the identity of the facts, or, if they
    have none yet, with a new one. Blocks."""
    service_id, secret = (facts.service_id, facts.secret) if facts.service_id else new_identity()
    on_head = facts.home_node is None  # by resources: Ray takes soft affinity for a hint where an actor needs none
    return (
        ray.remote(ServiceIdentity)
        .options(
            name=identity_name(app),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            resources=ON_HEAD if on_head else {},
            # not in the placement group of the replica that asks
            scheduling_strategy="DEFAULT" if on_head else NodeAffinitySchedulingStrategy(facts.home_node, soft=False),
        )
        .remote(service_id, secret, lease_s)
    )
