"""What every process of one service is told at its start: names, and the facts of this life of the service.

Built once by the launcher or by cluster/app.py, carried in deployment init arguments (never on a command line).
"""

import secrets
from pathlib import Path

import msgspec

import cluster
import configs
import offload
import parallel
import workers
from workers.channel import new_secret

APP = "tandem"
GATEWAY = "tandem-gateway"
COORDINATOR = "tandem-coordinator"
REDIS = "tandem-redis"
MAX_ONGOING_REQUESTS = 100_000
"""Above every queue limit: admission is the engine's, Serve only counts."""


class ServiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a service. redis_url None: ask the tandem-redis deployment. open_port: gateways listen
    themselves. gateway_node: address of the node that gateways must run on, because their port is there."""

    service_id: str
    secret: str
    install: str
    single_node: bool
    redis_url: str | None = None
    open_port: bool = False
    device: str = "cpu"
    gateway_node: str | None = None


def new_facts(
    *,
    single_node: bool,
    redis_url: str | None = None,
    open_port: bool = False,
    device: str = "cpu",
    gateway_node: str | None = None,
) -> ServiceFacts:
    """Facts of a new life: a fresh id and a fresh secret."""
    return ServiceFacts(
        service_id=secrets.token_hex(6),
        secret=new_secret(),
        install=install_root(),
        single_node=single_node,
        redis_url=redis_url,
        open_port=open_port,
        device=device,
        gateway_node=gateway_node,
    )


def install_root() -> str:
    """The folder that holds our packages; all of them, or some other package has taken one of our names."""
    roots = {
        module.__name__: str(Path(module.__file__ or ".").resolve().parent.parent)
        for module in (cluster, configs, offload, parallel, workers)
    }
    root = roots["cluster"]
    for name, found in roots.items():
        if found != root:
            raise ImportError(f"the package {name} was taken from {found}, not from Tandem's install")
    return root


def check_install(facts: ServiceFacts) -> None:
    """Raises ImportError when a package of the user's shadows one of ours in this process."""
    here = install_root()
    if facts.single_node and here != facts.install:
        raise ImportError(f"Tandem was started from {facts.install} but this process imports it from {here}")
