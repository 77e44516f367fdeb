"""Nodes that come for groups and go with them: Ray's autoscaler, its monitor on the head, and its provider of fake
nodes, each a raylet of its own in the head's namespaces, with a label and room for one group.

`ray.cluster_utils.AutoscalingCluster` would write the same file: it runs `ray stop --force`, and the example that it
reads is not in Ray's package. What stays on the head, the gateway and the service's identity, must keep no node.
"""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.lab.ray_nodes import CONNECT, GCS_PORT, HTTP_PORT, REST_PORT, START_S, RayNodes, demo
from tests.lab.steady_streams import SteadyStreams
from tests.support.service import wait_for
from tools.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(1500)]
MOST = 3
PROMPTS = tuple(f"In the year {1900 + number} a" for number in range(4))
HEAD = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"
"""The id that Ray's provider of fake nodes knows its head by."""
FAKE = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
LIVES = CONNECT + "print(json.dumps([n['Labels'].get('tandem', '') for n in ray.nodes() if n['Alive']]))"
CHANGE_S = 300.0


def cluster(address: str) -> dict[str, Any]:
    """What `ray start --autoscaling-config` reads: up to MOST nodes of the label, for one group each."""
    worker = {"resources": {"CPU": 1, "object_store_memory": 80_000_000}, "labels": {"tandem": "engine"}}
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "lab",
        "max_workers": MOST,
        "provider": {
            "type": "external",  # `fake_multinode` reads a file that Ray's package lacks
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "head_node_id": HEAD,
            "gcs_address": f"{address}:{GCS_PORT}",
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "engine": {**worker, "node_config": {}, "min_workers": 0, "max_workers": MOST},
        },
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": 0.2,
        "upscaling_speed": 1.0,
        "auth": {"ssh_user": "nobody"},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{name}_commands": [] for name in lists},
    }


RANKS = 8
"""Of a group: a node has one CPU, as Ray's files count them whole, and a rank asks for a tenth."""
SCALED = {
    "min_replicas": 0,
    "max_replicas": MOST,
    "look_back_period_s": 2,
    "metrics_interval_s": 0.5,
    "upscale_delay_s": 1,
    "downscale_delay_s": 5,
    "downscale_to_zero_delay_s": 5,
}


class Scaled:
    """The service, and the nodes that live."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        file = folder / "cluster.json"
        file.write_text(json.dumps(cluster(next(iter(lab.nodes.values())).address)))
        self.ray_nodes = RayNodes(lab, [f"--autoscaling-config={file}"], more=FAKE)
        wait_for(self._is_listening, START_S, f"Ray's dashboard: {self._said()}", 1.0)
        size = {"tensor_parallel_size": RANKS, "devices_per_node": RANKS, "max_num_seqs": 2}
        config = demo({**size, "label_selector": {"tandem": "engine"}})
        args = config["applications"][0]["args"]
        args["deployment_config"] = {"autoscaling_config": SCALED}
        self.ray_nodes.deploy(config)

    def _is_listening(self) -> bool:
        with self.ray_nodes.head.network(), socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", REST_PORT)) == 0

    def _said(self) -> str:
        return "\n".join(log.read_text() for log in self.ray_nodes.head.folder.glob("ray-*.log"))

    def engines(self) -> int:
        """Nodes for groups that live."""
        return json.loads(self.ray_nodes.script(LIVES)).count("engine")

    def groups(self) -> int:
        load = self.ray_nodes.get("/load")
        return -1 if load is None else int(load["groups"])


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scaled]:
    with Lab("a") as lab:
        made = Scaled(lab, tmp_path_factory.mktemp("scaled"))
        yield made
        made.ray_nodes.close()


def test_nodes_come_with_groups_and_go_with_them(scaled: Scaled) -> None:
    ray_nodes = scaled.ray_nodes
    assert scaled.engines() == 0 and scaled.groups() == 0
    assert ray_nodes.get("/readyz") == {"status": "ok", "asleep": True}
    first: list[int] = []
    waking = threading.Thread(target=lambda: first.append(ask(ray_nodes)))
    waking.start()
    wait_for(lambda: scaled.engines() == 1, CHANGE_S, "a node for the held request")
    waking.join(CHANGE_S)
    assert first == [200], "it was held while a node came and a group loaded"
    streams = SteadyStreams(ray_nodes.head, "", PROMPTS, 12, (2.0, 6.0), 20.0)
    try:
        wait_for(lambda: scaled.engines() == MOST, CHANGE_S, "a node for each group")
    finally:
        streams.stop()
    assert streams.streams and not streams.bad()
    wait_for(lambda: scaled.groups() == 0, CHANGE_S, "no group")
    wait_for(lambda: scaled.engines() == 0, CHANGE_S, "no node but the head, on which the identity lives")
    assert ray_nodes.get("/readyz") == {"status": "ok", "asleep": True}
    assert ask(ray_nodes) == 200, "and again from nothing"


def ask(ray_nodes: RayNodes) -> int:
    """The status of a short answer, from a client on the head."""
    asked = {"model": "demo", "prompt": "In the year", "max_tokens": 4}
    with ray_nodes.head.network():
        url = f"http://127.0.0.1:{HTTP_PORT}/v1/completions"
        return httpx.post(url, json=asked, timeout=START_S, trust_env=False).status_code
