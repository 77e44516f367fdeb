"""Choices of `serve run` by the nodes of a Ray cluster: the device of the ranks, loopback or not, and gateways."""

import logging
import math
from typing import Any

from tandem.configs.errors import SettingsError
from tandem.configs.schema import Device

log = logging.getLogger("ray.serve.tandem")
NODES_OF_A_GATEWAY = 4


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


def choose_home(asked: bool | None, device: Device, nodes: list[dict[str, Any]]) -> str | None:
    """The id of the node whose loopback connects the service's processes; None when they use the nodes' addresses.

    asked: `single_node` of args. With None, a cluster of one node counts as complete, unless the device is cuda and the
    node has no GPU; a process that Ray places elsewhere later refuses to start (service_facts.check_node). Raises
    SettingsError when `single_node` is asked of several nodes.
    """
    if asked and len(nodes) != 1:
        raise SettingsError(f"the cluster has {len(nodes)} nodes", "single_node")
    if asked is False or len(nodes) != 1:
        log.info("%d node(s): talking over the nodes' own addresses", len(nodes))
        return None
    (node,) = nodes
    if not asked and device == "cuda" and not node["Resources"].get("GPU"):
        log.info("no GPU here yet: talking over the nodes' own addresses, groups will be on others")
        return None
    log.info("one node: talking over loopback; `single_node: false` in args is for a cluster that will have more")
    return str(node["NodeID"])


def gateways_for(nodes: int) -> int:
    """Returns how many gateways serve a cluster that does not say: one on one node; on several at least two, as one may
    be lost with its node, and one for every NODES_OF_A_GATEWAY, as each is one process with one event loop."""
    return 1 if nodes <= 1 else max(2, math.ceil(nodes / NODES_OF_A_GATEWAY))
