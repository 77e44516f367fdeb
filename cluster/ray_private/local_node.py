"""Ray's own Node, the processes of a private Ray, which ray.init() keeps in a global variable of its driver.

Called by cluster/service/ray_node.py, before which nothing has imported ray: so functions import it here.
"""

import functools
import inspect
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tandem.cluster.process.signals import unblock
from tandem.configs.limits import Ports, listen

GCS, RAYLET = "gcs_server", "raylet"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
OUTSIDE = Ports(15_000, 30_000)
"""Ports that no kernel gives to sockets that ask for any, by default."""
GCS_START_S = 10.0
RAYLET_START_S = 180.0
"""Ray's own 30 s are too few for busy cores and cold disks. An agent of Ray has as long (switches.env)."""
LOOPBACK = {"_node_ip_address": "127.0.0.1"}


def start_node(temp_folder: Path, gcs_folder: Path, **options: Any) -> None:
    """Starts a Ray below this process, on loopback, and connects to it. gcs_folder: for what its GCS knows. options: of
    ray.init().

    Lost without its private arguments: Ray's files stand in /tmp/ray, it listens on the machine's address, and what
    its GCS knows dies with it.
    """
    import ray

    kept = {"gcs_storage": "rocksdb", "gcs_storage_path": str(gcs_folder)}
    with _trimmed(**_free_ports(AGENT_PORTS)):
        ray.init(address="local", _temp_dir=str(temp_folder), _system_config=kept, **LOOPBACK, **options)


class GcsServer:
    """The GCS of a private Ray, for who keeps it running (a Startable). node: of take_node().

    Lost without it: a GCS that dies is not started again, and takes the service with it a minute later.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    def is_alive(self) -> bool:
        """True while it runs."""
        return GCS in self._node.all_processes and GCS not in _dead(self._node)

    def start(self) -> None:
        """Starts it again, at its address and with all that it knew, and returns when it listens. OSError when it does
        not in GCS_START_S."""
        self._node.kill_gcs_server(check_alive=False)  # no longer among the node's processes
        with _trimmed():
            self._node.start_gcs_server()
        deadline_s = time.monotonic() + GCS_START_S
        while not is_listening(self._node.gcs_address):
            if not self.is_alive() or time.monotonic() > deadline_s:
                raise OSError("it does not listen")
            time.sleep(0.02)


def connect_to_node(node: Any, **options: Any) -> None:
    """Connects to the Ray of take_node(), with Ray's exceptions. options: of ray.init()."""
    import ray

    ray.init(address=node.gcs_address, **LOOPBACK, **options)


def take_node() -> Any:
    """Takes the Node away from the driver, None for a joined Ray, and returns it.

    Lost without it: leave() and rejoin() of ray_node.py; the launcher stays a driver, 0.2 % of a core.
    """
    import ray

    worker = ray._private.worker
    # ray.shutdown() ends the processes of the node it finds here; if there is none, only the driver leaves.
    node, worker._global_node = worker._global_node, None
    return node


def give_back_node(node: Any) -> None:
    """Gives the Node of take_node() to the driver, whose ray.shutdown() ends its processes from now on."""
    import ray

    # ray.init() to a Ray that runs has put none here, or one that started nothing and so would end nothing.
    ray._private.worker._global_node = node


def raylet_runs(node: Any) -> bool:
    """True while the raylet runs. node: of take_node(); None: the driver's, and True for a joined Ray.

    Lost without it: a service whose Ray has died would not end.
    """
    return RAYLET not in _dead(node)


def node_runs(node: Any) -> bool:
    """True while raylet and GCS run, so that Ray can be asked. node: as in raylet_runs().

    Lost without it: a service that ends would wait for a Ray that has ended before it.
    """
    return raylet_runs(node) and GCS not in _dead(node)


def is_listening(address: str, timeout_s: float = 1.0) -> bool:
    """True if a server takes connections at `address`, host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except OSError:
        return False
    return True


def _dead(node: Any) -> set[str]:
    """The kinds of a node's processes that have ended. node: None: the driver's."""
    import ray

    node = node or ray._private.worker._global_node
    return {GCS, RAYLET} if node is None else {kind for kind, _ in node.dead_processes()}


def keep_workers_off_terminal() -> None:
    """Prints nothing of other processes.

    Lost without it: a dead worker is reported in ten lines, log_to_driver or not.
    """
    import ray

    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None


def _popen(
    popen: Callable[..., Any],
    started: list[Any],
    *args: Any,
    preexec_fn: Callable[[], None] | None = None,
    **kwargs: Any,
) -> Any:
    def before_exec() -> None:
        unblock()
        if preexec_fn is not None:
            preexec_fn()

    started.append(popen(*args, preexec_fn=before_exec, process_group=0, **kwargs))
    return started[-1]


def _patient(find: Callable[..., Any], started: Sequence[Any], clock: Callable[[], float], *args: Any) -> Any:
    """Returns what `find` does once it raises no RuntimeError. Raises that when a process of `started` has ended, or
    RAYLET_START_S after the call."""
    deadline_s = clock() + RAYLET_START_S
    while True:
        try:
            return find(*args)
        except RuntimeError:
            if clock() > deadline_s or any(process.poll() is not None for process in started):
                raise
            time.sleep(0.1)


def _no_api_server(start: Callable[..., Any], include_dashboard: bool | None, *args: Any, **kwargs: Any) -> Any:
    """Starts the API server where a dashboard is asked for; otherwise it is a process that nobody asks anything.
    Returns the dashboard's URL and its process, as `start` does."""
    return ("", None) if include_dashboard is False else start(include_dashboard, *args, **kwargs)


def _free_ports(names: Sequence[str]) -> dict[str, int]:
    """A port for each name, free on all addresses of this machine."""
    with ExitStack() as held:
        found = [held.enter_context(listen("0.0.0.0", OUTSIDE)) for _ in names]
        return {name: listener.getsockname()[1] for name, listener in zip(names, found, strict=True)}


@contextmanager
def _trimmed(**given: int) -> Iterator[None]:
    """Makes ray.init() leave out the autoscaler monitor and the log monitor, as only `ray start` can, and the API
    server of a dashboard that is off, and give its agents their ports.

    Lost without RayParams: about 2 s of start and 170 MiB; a Ray whose parameters have other names is started whole,
    and ends where an agent takes 15 s to choose its port.
    Lost without ConsolePopen: process groups of their own, so that Ctrl+C ends Ray's processes before the drain.
    Lost without start_api_server: 2 s of start, which waits for that process, and 100 MiB.
    Lost without get_node: a raylet that is not known to GCS after 30 s, on a busy machine, is a start that fails.
    """
    from ray._private import parameter, services

    whole = parameter.RayParams

    def trimmed(*args: Any, **kwargs: Any) -> Any:
        return whole(*args, **kwargs | asked)

    asked = {"no_monitor": True, "include_log_monitor": False, **given}
    if asked.keys() <= set(inspect.signature(whole).parameters):
        parameter.RayParams = trimmed
    popen, api_server, get_node = services.ConsolePopen, services.start_api_server, services.get_node
    started: list[Any] = []
    services.ConsolePopen = functools.partial(_popen, popen, started)
    services.get_node = functools.partial(_patient, get_node, started, time.monotonic)
    services.start_api_server = functools.partial(_no_api_server, api_server)
    try:
        yield
    finally:
        parameter.RayParams = whole
        services.ConsolePopen, services.start_api_server, services.get_node = popen, api_server, get_node
