"""What every process of one service is told at its start: names, and the facts of this life of the service.

Built once by the launcher or by cluster/app.py, carried in deployment init arguments (never on a command line).
"""

import math
import secrets
from pathlib import Path

import msgspec

import cluster
import configs
import offload
import parallel
import workers
from configs.errors import SettingsError
from workers.channel import new_secret

APP = "tandem"
GATEWAY = "tandem-gateway"
COORDINATOR = "tandem-coordinator"
REDIS = "tandem-redis"
MAX_ONGOING_REQUESTS = 100_000
"""Above every queue limit: admission is the engine's, Serve only counts."""


class ServiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a service.

    single_node: all processes are on one machine and talk over loopback. home_node: that machine's Ray node id, when
    others could join; every process there refuses to start elsewhere. redis_url None: ask the tandem-redis deployment.
    open_port: gateways listen themselves. gateway_node: address of the node that gateways must run on, because their
    port is there. groups_on_node: the most groups that may share a machine (groups_per_node). host_socket: where the
    host-tier process of the one machine answers, None: ranks hold the host tier's memory themselves.
    """

    service_id: str
    secret: str
    install: str
    single_node: bool
    redis_url: str | None = None
    open_port: bool = False
    device: str = "cpu"
    gateway_node: str | None = None
    groups_on_node: int = 1
    home_node: str | None = None
    host_socket: str | None = None


def groups_per_node(groups: int, nodes: int) -> int:
    """The most groups that may share a machine: `groups` at most (with autoscaling: its maximum, running or not) over
    `nodes` machines. Ray places a group where the largest share is free, so groups spread evenly over equal machines.
    CPU ranks divide cores and memory by it: too few threads are slow, too many ruinous."""
    return max(1, math.ceil(groups / max(1, nodes)))


def new_facts(
    *,
    single_node: bool,
    redis_url: str | None = None,
    open_port: bool = False,
    device: str = "cpu",
    gateway_node: str | None = None,
    groups_on_node: int = 1,
    home_node: str | None = None,
    host_socket: str | None = None,
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
        groups_on_node=groups_on_node,
        home_node=home_node,
        host_socket=host_socket,
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
    """For every process that Ray starts: raises ImportError when a package of the user's shadows one of ours in it,
    SettingsError when Ray has put it on a machine where nobody could reach it."""
    if facts.home_node is not None:
        import ray  # the launcher imports this module before Ray's environment is set

        check_home(facts.home_node, ray.get_runtime_context().get_node_id())
    here = install_root()
    if facts.single_node and here != facts.install:
        raise ImportError(f"Tandem was started from {facts.install} but this process imports it from {here}")


def check_home(home_node: str, here: str) -> None:
    """Raises SettingsError when this process is not on the machine that the service was bound to."""
    if here != home_node:
        raise SettingsError(
            f"this process was placed on node {here}, but the service was deployed while node {home_node} was the only "
            "one and talks over its loopback; set `single_node: false` in the application's args and deploy again",
            "single_node",
        )
