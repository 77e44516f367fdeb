"""A Ray cluster on the nodes of a lab, and an application deployed there as `serve deploy` does it."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import psutil
import yaml

from tandem.workers.messages.channel import new_secret
from tests.support.service import BIN, wait_for
from tools.lab import Lab, LabError, Node

GCS_PORT, REST_PORT, HTTP_PORT = 6399, 8265, 8000
START_S, RAYLET_S = 180, 60
FILL = """
import ray, sys
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=float(sys.argv[1]))
class Other:
    def __call__(self): pass

for node in ray.nodes():
    where = {f"node:{node['NodeManagerAddress']}": 0.001}
    other = Other.options(name=node["NodeID"], lifetime="detached", resources=where).remote()
    ray.get(other.__call__.remote())
"""
COUNT = """
import ray
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(sum(node["Alive"] for node in ray.nodes()), "node")
"""


class RayNodes:
    """Ray on all nodes of a lab, the first one its head, each with one CPU and a label `node`, its name.
    environment: more for its processes. The lab ends it."""

    def __init__(self, lab: Lab, environment: Mapping[str, str] = {}) -> None:
        self.head, *others = lab.nodes.values()
        token = lab.folder / "token"
        token.write_text(new_secret())
        token.chmod(0o600)
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
            "RAY_raylet_start_wait_time_s": str(RAYLET_S),
            "OMP_WAIT_POLICY": "passive",
            **environment,
        }
        self._started: dict[Node, subprocess.Popen[Any]] = {}
        gcs = f"{self.head.address}:{GCS_PORT}"
        words = {self.head: ["--head", f"--port={GCS_PORT}", "--dashboard-host=127.0.0.1"]}
        self._start(words)
        self._start(words | {node: [f"--address={gcs}"] for node in others})

    def leave_cpus(self, amount: float) -> None:
        """Takes all CPUs of every node but so much."""
        self.head.run(str(BIN / "python"), "-c", FILL, str(1 - amount), timeout_s=START_S, env=self.environment)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploys a Serve file, and returns when its application runs."""
        file = self.head.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self.head.run(str(BIN / "serve"), "deploy", str(file), timeout_s=START_S, env=self.environment)
        try:
            wait_for(self.is_ready, START_S, "it is ready")
        except AssertionError as error:
            said = self.head.run(str(BIN / "serve"), "status", timeout_s=START_S, env=self.environment)
            raise AssertionError(f"{error}; {said}") from None

    def is_ready(self) -> bool:
        """Whether the service answers at the head's proxy."""
        with self.head.network():
            try:
                return httpx.get(f"http://127.0.0.1:{HTTP_PORT}/readyz", timeout=5, trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

    def close(self) -> None:
        """Ends Ray on all nodes, which live on."""
        for process in self._started.values():
            for child in psutil.Process(process.pid).children():
                child.kill()
        for process in self._started.values():
            process.wait(60)

    def _start(self, words: Mapping[Node, Sequence[str]]) -> None:
        """Returns when these nodes are up. words: of `ray start` on each. A raylet gives up where its agents take more
        than 15 s, as on a busy machine; such a node starts again."""

        def all_up() -> bool:
            for node, own in words.items():
                if node not in self._started or self._started[node].poll() is not None:
                    self._started[node] = self._ray_start(node, own)
            return f"{len(words)} node" in self._nodes()

        wait_for(all_up, 2 * START_S, "the nodes are up")

    def _ray_start(self, node: Node, words: Sequence[str]) -> subprocess.Popen[Any]:
        log = (node.folder / "ray.log").open("w")
        place = [f"--node-ip-address={node.address}", f"--temp-dir={node.folder}", "--num-cpus=1"]
        place.append(f"--labels=node={node.name}")
        command = [str(BIN / "ray"), "start", *words, *place, "--object-store-memory=80000000", "--block"]
        return node.start(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def _nodes(self) -> str:
        """How many nodes Ray has, in words."""
        try:
            return self.head.run(str(BIN / "python"), "-c", COUNT, env=self.environment)
        except (LabError, subprocess.TimeoutExpired):
            return ""
