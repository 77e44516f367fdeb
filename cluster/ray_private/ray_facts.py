"""Facts that Ray and Serve tell only themselves, for processes of Ray and connected drivers."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray._private import worker as ray_worker
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import available_resources_per_node
from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]

GCS_CALL_S: Final = 5.0
ON_HEAD: Final = {HEAD_NODE_RESOURCE_NAME: 0.001}
"""Resources that only the head node has, also one that is started again.

Lost without them: a service's record and its private Redis are on a node that lives as long as the cluster."""


def gcs_of(address: str) -> str | None:
    """Returns HOST:PORT of the GCS that ray.init(address) would ask, from RAY_ADDRESS and Ray's own files for `auto`;
    None where it would look for one by other means. ValueError for what is no address.

    Lost without it: a machine that is cut off from the head waits for a minute and more, and says nothing.
    """
    if "://" in address:
        return None
    found: str | None = canonicalize_bootstrap_address(address)
    return found


def gcs_answers(address: str, timeout_s: float = 1.0) -> bool:
    """True if the GCS at HOST:PORT speaks. Blocks, for timeout_s at most.

    Lost without it: a GCS that is stopped counts as one that answers, as its kernel takes connections in its place.
    """
    speaks = threading.Event()
    channel = init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)])
    channel.subscribe(lambda state: speaks.set() if state.name == "READY" else None, try_to_connect=True)
    try:
        return speaks.wait(timeout_s)
    finally:
        channel.close()


def free_resources(labels: Mapping[str, str]) -> list[dict[str, float]]:
    """The resources that each node of the cluster has left which a selector of labels takes; an empty one takes all.

    Lost without it: a new version that starts before the old one ends where there is room for both.
    """
    labels_of = {node["NodeID"]: node.get("Labels", {}) for node in ray.nodes() if node["Alive"]}
    left = available_resources_per_node()
    return [
        left[node] for node in left.keys() & labels_of.keys() if node_labels_match_selector(labels_of[node], labels)
    ]


def node_resources(labels: Mapping[str, str], resource: str) -> list[dict[str, float]]:
    """All resources of each node that lives and that a selector of labels takes, where it has some of `resource`.

    Lost without labels: nodes that groups are never placed on count as theirs, in how they divide memory.
    """
    alive = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get(resource)]
    return [node["Resources"] for node in alive if node_labels_match_selector(node.get("Labels", {}), labels)]


def labels_match(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Returns whether Ray's selector takes a node with these labels."""
    return bool(node_labels_match_selector(dict(labels), dict(selector)))


def reported_by_monitor() -> bytes | None:
    """Returns what Ray's monitor last said of nodes and its own process, as JSON; None: no monitor runs.

    Lost without it: room that an autoscaler may bring does not count, and old groups end before new ones start.
    """
    from ray.experimental.internal_kv import _internal_kv_get

    told: bytes | None = _internal_kv_get(DEBUG_AUTOSCALING_STATUS)
    return told


def on_head(call: Callable[..., Any], argument: Any, timeout_s: float) -> Any:
    """Runs call(argument) on the head node and returns what it returns. Blocks; Ray's errors."""
    asked = ray.remote(call).options(num_cpus=0, resources=ON_HEAD).remote(argument)
    return ray.get(asked, timeout=timeout_s)


def session_folder() -> Path:
    """The folder of Ray's session on this node, which outlives every actor.

    Lost without it: the place of the private Redis under `serve run`; a temporary folder would need its own cleaner.
    """
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def proxy_host() -> str | None:
    """The address that Serve's proxies listen on; None while Serve does not run. Blocks.

    Lost without it: the refusal of an open service whose proxy listens beyond loopback.
    """
    from ray.serve.context import _get_global_client  # the identity's actor needs no Serve

    client = _get_global_client(raise_if_no_controller_running=False)
    return None if client is None else client.http_config.host


def draining_nodes() -> set[str]:
    """The ids of the nodes that are to go. Blocks, at most GCS_CALL_S; raises when Ray's head does not answer.

    Lost without it: requests of a group whose ranks are on such a node are moved when it goes, not before.
    """
    return set(ray_worker.global_worker.gcs_client.get_draining_nodes(timeout=GCS_CALL_S))
