"""NodeProbe: an actor that `tandem doctor --cluster` places on every node, to read its facts and to try connections.

ask_nodes() places them and collects what they say; cluster_misfits.py judges it. Torch-free.
"""

import os
import resource
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.cluster.deploy.cluster_misfits import NodeReport
from tandem.cluster.deploy.machine_facts import read_facts
from tandem.cluster.ray_private.ray_facts import ON_HEAD
from tandem.configs.errors import SettingsError
from tandem.configs.limits import Ports, kernel_ports, listen
from tandem.configs.schema import ModelSettings
from tandem.workers.planning.model_source import has_model

CONNECT_S, ANSWER_S = 3.0, 60.0
RAYS_THRESHOLD, RAYS_REFRESH_MS = "0.95", "250"
"""Ray's own values where its environment says nothing."""
Address = tuple[str, int]
SOCKETS: Final = 3
"""Listening sockets of each node."""
AT_A_TIME: Final = 32
"""Nodes that a node tries to reach at the same time: a firewall that drops packets costs CONNECT_S for each."""


class NodeProbe:
    """The actor. Its calls block."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._listeners: list[socket.socket] = []

    def facts(self, model: ModelSettings | None) -> dict[str, Any]:
        """Returns the fields of a NodeReport that the node itself knows. model: a pinned one to look for."""
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return {
            "facts": read_facts(),
            "name": socket.gethostname(),
            "open_files": None if open_files == resource.RLIM_INFINITY else open_files,
            "threshold": memory_threshold(os.environ),
            "kernel_ports": kernel_ports(),
            "has_model": None if model is None else has_model(model),
        }

    def listen(self, ports: Ports) -> tuple[str, list[Address]]:
        """Listens as the processes of a service would; returns what it says to those who connect, and where."""
        host = ray.util.get_node_ip_address()
        for _ in range(SOCKETS):
            listener = listen(host, ports)
            self._listeners.append(listener)
            threading.Thread(target=self._greet, args=(listener,), daemon=True).start()
        return self._nonce, [listener.getsockname()[:2] for listener in self._listeners]

    def unreached(self, others: Mapping[str, tuple[str, Sequence[Address]]]) -> dict[str, str]:
        """Returns which of the nodes' sockets cannot be connected to, and why, by node."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            reasons = dict(zip(others, pool.map(lambda told: first_refusal(*told), others.values()), strict=True))
        return {node: why for node, why in reasons.items() if why is not None}

    def _greet(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(self._nonce.encode())


def first_refusal(nonce: str, addresses: Sequence[Address]) -> str | None:
    """Returns the first of a node's addresses that cannot be connected to, and why; None where all can."""
    for host, port in addresses:
        if (why := refusal((host, port), nonce)) is not None:
            return f"{host}:{port}: {why}"
    return None


def refusal(address: Address, nonce: str) -> str | None:
    """Returns why the listener of that nonce does not answer at an address, None where it does."""
    try:
        with socket.create_connection(address, timeout=CONNECT_S) as connection:
            said = connection.recv(len(nonce), socket.MSG_WAITALL).decode(errors="replace")
    except TimeoutError:
        return f"no answer in {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return None if said == nonce else "another process answers"


def memory_threshold(environment: Mapping[str, str]) -> float | None:
    """Returns the share of a node's memory from which on its Ray kills workers, None: never. environment: a worker's,
    which has it of its raylet."""
    if environment.get("RAY_memory_monitor_refresh_ms", RAYS_REFRESH_MS) == "0":
        return None
    return float(environment.get("RAY_memory_usage_threshold", RAYS_THRESHOLD))


def ask_nodes(ports: Ports, model: ModelSettings | None = None) -> list[NodeReport]:
    """Asks every node that lives; the head is the first. Needs a connection to Ray. ports: of the service's sockets.
    model: a pinned one that nodes look for. A node that does not answer is in the result, with the reason."""
    reports = [_known(node) for node in ray.nodes() if node["Alive"]]
    probes = {report.node_id: _probe_on(report.node_id) for report in reports}
    told = _answers({node: probe.facts.remote(model) for node, probe in probes.items()})
    reports = [_with_answer(report, told[report.node_id]) for report in reports]
    well = [report.node_id for report in reports if not report.error]
    heard = _answers({node: probes[node].listen.remote(ports) for node in well})
    places = {node: place for node, place in heard.items() if not isinstance(place, Exception)}
    missed = _answers(
        {node: probes[node].unreached.remote({k: v for k, v in places.items() if k != node}) for node in well}
    )
    for probe in probes.values():
        ray.kill(probe)
    found = [with_reach(report, heard.get(report.node_id), missed.get(report.node_id)) for report in reports]
    return sorted(found, key=lambda report: (not report.is_head, report.name, report.address))


def with_reach(report: NodeReport, heard: Any, missed: Any) -> NodeReport:
    """Returns a report with the nodes that it does not reach. heard, missed: results of listen() and unreached(), or
    their errors; None where they were not called, as the node did not answer before."""
    for answer in (heard, missed):
        if isinstance(answer, Exception):
            return replace(report, error=_first_line(answer))
    return report if missed is None else replace(report, unreached=missed)


def _known(node: Mapping[str, Any]) -> NodeReport:
    """Returns what Ray says of a node."""
    resources = node["Resources"]
    return NodeReport(
        node_id=node["NodeID"],
        name=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        is_head=any(name in resources for name in ON_HEAD),
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        object_store_bytes=int(resources.get("object_store_memory", 0)),
    )


def _probe_on(node_id: str) -> Any:
    place = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(NodeProbe).options(num_cpus=0, scheduling_strategy=place).remote()


def _answers(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Waits for calls, by node; returns their results, or the error of those that have none."""
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
    there, answers = set(ready), dict[str, Any]()
    for node, call in asked.items():
        try:
            answers[node] = ray.get(call) if call in there else TimeoutError(f"no answer in {ANSWER_S:g} s")
        except Exception as error:  # of many kinds: the node is lost, or its Python is another
            answers[node] = error
    return answers


def _with_answer(report: NodeReport, answer: Any) -> NodeReport:
    return replace(report, error=_first_line(answer)) if isinstance(answer, Exception) else replace(report, **answer)


def _first_line(error: Exception) -> str:
    """The last line of an error that is not empty: Ray's are tracebacks."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, SettingsError):
        return str(cause)
    return next((line for line in reversed(str(cause).splitlines()) if line.strip()), type(cause).__name__).strip()
