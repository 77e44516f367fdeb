"""Planned ends of nodes of Ray, asked for as `ray drain-node` does."""

import time
from typing import NamedTuple

import ray
from ray._private import worker as ray_worker
from ray.core.generated import autoscaler_pb2

from tandem.cluster.ray_private.ray_facts import GCS_CALL_S, ON_HEAD


class RayNode(NamedTuple):
    """A node that lives. node_id: Ray's, in hex; name: of its host."""

    node_id: str
    address: str
    name: str
    is_head: bool

    def is_called(self, name: str) -> bool:
        """True for its id, 8 or more of the first digits of it, its address and its host's name."""
        return name in (self.address, self.name) or (len(name) >= 8 and self.node_id.startswith(name))


def nodes_called(name: str) -> list[RayNode]:
    """The nodes that live and are called so. Blocks."""
    nodes = (
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            any(one in node["Resources"] for one in ON_HEAD),
        )
        for node in ray.nodes()
        if node["Alive"]
    )
    return [node for node in nodes if node.is_called(name)]


def drain_node(node_id: str, why: str, timeout_s: float) -> str:
    """Tells Ray that a node goes in timeout_s: nothing is started there any more, and Serve moves its replicas. Returns
    why Ray does not take it, or "". Blocks.

    Lost without it: `tandem drain` of a node; `ray drain-node` is left.
    """
    accepted, refusal = ray_worker.global_worker.gcs_client.drain_node(
        node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        why,
        int((time.time() + timeout_s) * 1000),
        timeout=GCS_CALL_S,
    )
    return "" if accepted else str(refusal or "Ray does not say why")
