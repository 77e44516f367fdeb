"""Choices by the nodes of a Ray cluster, for `serve run` and `tandem serve --address`: the device of the ranks, sizes
of steps, whether memory suffices, loopback or not, and gateways. A node is a dict of ray.nodes()."""

import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from tandem.cluster.deploy.devices import cuda_memory_bytes
from tandem.cluster.deploy.preflight import check_memory, with_device
from tandem.configs.errors import SettingsError
from tandem.configs.schema import Device, ServiceSettings

log = logging.getLogger("ray.serve.tandem")
NODES_OF_A_GATEWAY = 4
ASK_S = 20.0
"""The longest wait for what a node says of itself."""
Node = dict[str, Any]


def alive_nodes() -> list[Node]:
    """The nodes that are in the cluster now. Needs a connection to Ray."""
    import ray  # the launcher prepares its environment first

    return [node for node in ray.nodes() if node["Alive"]]


def node_gpus(nodes: Sequence[Node]) -> list[float]:
    """The number of GPUs of each node that has any."""
    return [gpus for node in nodes if (gpus := float(node["Resources"].get("GPU", 0))) > 0]


def gpu_memory(node_id: str) -> int | None:
    """Bytes of a node's first GPU, asked there; None when it does not answer in ASK_S. Needs a connection to Ray."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    try:
        asked = ray.remote(_bytes_of_gpu).options(num_cpus=0, scheduling_strategy=there).remote()
        return int(ray.get(asked, timeout=ASK_S) or 0) or None
    except ray.exceptions.RayError as error:
        log.warning("node %s does not say how much memory its GPU has: %s", node_id, str(error).partition("\n")[0])
        return None


def _bytes_of_gpu() -> int | None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # a task that asks for no GPU sees none
    return cuda_memory_bytes()


def on_cluster(
    settings: ServiceSettings, nodes: Sequence[Node], memory: Callable[[str], int | None] = gpu_memory
) -> ServiceSettings:
    """Settings with the device of the cluster's ranks and its sizes of steps. SettingsError as of with_device()."""
    device = cluster_device(settings.engine.device.device, node_gpus(nodes))
    asked = next((node["NodeID"] for node in nodes if device == "cuda" and node_gpus([node])), None)
    return with_device(settings, device, None if asked is None else memory(asked))


def memory_note(settings: ServiceSettings, nodes: Sequence[Node]) -> str | None:
    """A line for groups that the memory of all nodes together does not hold; more nodes may join. None: it does."""
    try:
        check_memory(settings, int(sum(float(node["Resources"].get("memory", 0)) for node in nodes)))
    except SettingsError as error:
        return f"the {len(nodes)} nodes that are here now are too small, and groups wait for more: {error}"
    return None


def cluster_device(asked: Device | None, node_gpus: list[float]) -> Device:
    """The device `asked`, even before nodes that have it join; without one, cuda if a node has a GPU now, else cpu."""
    if asked is not None:
        log.info("device %s, as asked", asked)
        return asked
    if node_gpus:
        log.info("device cuda: %d node(s) have GPUs", len(node_gpus))
        return "cuda"
    log.warning(
        "device cpu: no node has a GPU now, and GPUs that join later are left alone; "
        "`device: cuda` in engine_kwargs waits for them, `device: cpu` says that this is meant"
    )
    return "cpu"


def choose_home(asked: bool | None, nodes: list[dict[str, Any]]) -> str | None:
    """The id of the node whose loopback connects the service's processes; None when they use the nodes' addresses, as
    they do unless `single_node: true` is asked for: a cluster of one node may grow.

    A process that Ray places elsewhere later refuses to start (service_facts.check_node). Raises SettingsError when
    `single_node` is asked of several nodes.
    """
    if not asked:
        return None
    if len(nodes) != 1:
        raise SettingsError(f"the cluster has {len(nodes)} nodes", "single_node")
    log.info("talking over loopback: this cluster stays one of a single node, as asked")
    return str(nodes[0]["NodeID"])


def gateways_for(nodes: int, *, stays_alone: bool = False) -> int:
    """Returns how many gateways serve a cluster of so many nodes that does not say: at least two, as one may be lost
    with its node, and one for every NODES_OF_A_GATEWAY, as each is one process with one event loop. Also where only
    the head has joined yet: the number stays. stays_alone: there is one node, and no other will join."""
    return 1 if stays_alone else max(2, math.ceil(nodes / NODES_OF_A_GATEWAY))
