"""A Ray cluster on the nodes of a lab, and an application deployed there as `serve deploy` does it."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tandem.configs.bundled import read_switches
from tandem.workers.messages.channel import new_secret
from tests.support.service import BIN, wait_for
from tools.lab import Lab, LabError, Node

GCS_PORT, REST_PORT, HTTP_PORT = 6399, 8265, 8000
START_S = 300
RAY_START_S = 200
"""Of one node; less than pytest's limit of a test, so that what Ray says of it is seen."""
STARTED = "Ray runtime started"
PORTS = ("--metrics-export-port=8266", "--dashboard-agent-grpc-port=8267", "--runtime-env-agent-port=8268")
"""Of Ray's agents, as in configs/cluster."""
CONNECT = """
import json, sys, ray
ray.init(address="auto", namespace="lab", log_to_driver=False, logging_level="ERROR")
"""
HOLD = (
    CONNECT
    + """
@ray.remote
class Other:
    def __call__(self): pass

for address, name, cpus in json.loads(sys.argv[1]):
    where = {f"node:{address}": 0.001}
    other = Other.options(name=name, num_cpus=cpus, lifetime="detached", resources=where).remote()
    ray.get(other.__call__.remote())
"""
)
FREE = (
    CONNECT
    + """
for name in sys.argv[1:]:
    ray.kill(ray.get_actor(name))
"""
)
DRAIN = (
    CONNECT
    + """
from tandem.cluster.ray_private.node_ends import drain_node, nodes_called
found = nodes_called(sys.argv[1])
print(len(found), found[0].is_head, drain_node(found[0].node_id, "a test", float(sys.argv[2])) or "accepted")
"""
)
NODES = CONNECT + "print(json.dumps({n['NodeManagerAddress']: n['NodeID'] for n in ray.nodes() if n['Alive']}))"


class RayNodes:
    """Ray on all nodes of a lab, the first one its head, each with one CPU and a label `node`, its name. The lab ends
    it. of_head: more words of the head's `ray start`; more: of its environment; environment: more for all nodes."""

    def __init__(
        self,
        lab: Lab,
        of_head: Sequence[str] = (),
        more: Mapping[str, str] = {},
        environment: Mapping[str, str] = {},
    ) -> None:
        self.lab = lab
        self.head, *others = lab.nodes.values()
        token = lab.folder / "token"
        token.write_text(new_secret())
        token.chmod(0o600)
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            **read_switches(),
            "RAY_raylet_start_wait_time_s": str(START_S),
            "OMP_WAIT_POLICY": "passive",
            **environment,
        }
        self._started: list[subprocess.Popen[Any]] = []
        self._of_head = ["--head", f"--port={GCS_PORT}", "--dashboard-host=127.0.0.1", *of_head]
        self._more = more
        self.start_head()
        for node in others:
            self.join(node)

    def start_head(self) -> None:
        """Starts Ray on the head, for the first time or again."""
        self._start(self.head, *self._of_head)

    def kill_head(self) -> None:
        """Kills all of Ray on the head."""
        ray = self._started.pop(0)
        first = min(self.head.pids())
        for process in map(psutil.Process, self.head.pids() - {first}):
            process.kill()
        ray.wait(60)

    def join(self, node: Node) -> None:
        """Starts Ray on a node, which has joined the others then."""
        self._start(node, f"--address={self.head.address}:{GCS_PORT}")

    def ids(self) -> dict[str, str]:
        """Ray's ids of the nodes that live, by address; none while its head does not answer."""
        try:
            answer: dict[str, str] = json.loads(self.script(NODES))
        except (LabError, subprocess.TimeoutExpired):
            return {}
        return answer

    def leave_cpus(self, amounts: Mapping[str, float], slots: Mapping[str, float] = {}) -> None:
        """Takes all CPUs of nodes, by name, but these amounts and slots; the slots, too, until free()."""
        held = []
        for name, amount in amounts.items():
            address, slot = self.lab.nodes[name].address, slots.get(name, 0.0)
            held.append((address, f"{name}-rest", round(1 - amount - slot, 4)))
            held += [(address, f"{name}-slot", slot)] if slot else []
        self.script(HOLD, json.dumps(held))

    def free(self, *names: str) -> None:
        """Frees the slots of nodes: for those that wait for room, in the order of the calls."""
        self.script(FREE, *(f"{name}-slot" for name in names))

    def drain(self, node: Node, deadline_s: int) -> None:
        """Tells Ray that a node goes, as a gateway does for `tandem drain`, and a cloud for a machine that it takes."""
        said = self.script(DRAIN, node.address, str(deadline_s))
        assert said.split() == ["1", "False", "accepted"], said

    def deploy(self, config: Mapping[str, Any]) -> None:
        """Deploys a Serve file, and returns when its application runs."""
        self.begin_deploy(config)
        wait_for(self.is_ready, START_S, "the service is ready")

    def begin_deploy(self, config: Mapping[str, Any]) -> None:
        """Deploys a Serve file, and returns when a gateway runs."""
        file = self.head.folder / "serve.yaml"
        file.write_text(yaml.safe_dump(config))
        self._run("serve", "deploy", str(file))
        wait_for(lambda: self.get("/livez") is not None, START_S, "a gateway answers")

    def delete(self) -> None:
        """Deletes the application, and returns when it has ended."""
        self.script(CONNECT + "from ray import serve; serve.delete('tandem')")

    def is_ready(self) -> bool:
        """Whether the service answers at the head's proxy."""
        return self.get("/readyz") is not None

    def get(self, path: str, at: Node | None = None) -> Any:
        """The answer of the service at a node's proxy, the head's by default; None without a good one."""
        with (at or self.head).network():
            try:
                answer = httpx.get(f"http://127.0.0.1:{HTTP_PORT}{path}", timeout=5, trust_env=False)
            except httpx.HTTPError:
                return None
        return answer.json() if answer.status_code == 200 else None

    def script(self, source: str, *words: str) -> str:
        """Runs a script on the head node; returns what it printed."""
        return self._run("python", "-c", source, *words)

    def close(self) -> None:
        """Ends Ray on all nodes, which live on."""
        for process in self._started:
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
        for process in self._started:
            process.wait(60)

    def _run(self, program: str, *words: str) -> str:
        return self.head.run(str(BIN / program), *words, timeout_s=START_S, env=self.environment)

    def _start(self, node: Node, *words: str) -> None:
        """Returns when Ray runs there. One after the other, as a busy machine has more to do for each than for all."""
        log = (node.folder / f"ray-{len(list(node.folder.glob('ray-*.log')))}.log").open("w+")
        place = [f"--node-ip-address={node.address}", f"--temp-dir={node.folder}", "--num-cpus=1"]
        place.append(f"--labels=node={node.name}")
        command = [str(BIN / "ray"), "start", *place, *PORTS, *words, "--object-store-memory=80000000", "--block"]
        env = {**self.environment, **(self._more if node is self.head else {})}
        process = node.start(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        self._started.append(process)
        said = Path(log.name)
        try:
            wait_for(lambda: STARTED in said.read_text() or process.poll() is not None, RAY_START_S, "Ray starts")
        except AssertionError as error:
            logs = [file for file in node.folder.glob("session_*/logs/*") if file.is_file()]
            ends = [f"{file.name}: {file.read_text(errors='replace')[-300:]}" for file in logs]
            raise AssertionError(f"{error} on {node.name}: {said.read_text()}", *ends) from None
        assert process.poll() is None, said.read_text()


def demo(engine: Mapping[str, object], groups: int = 1) -> dict[str, Any]:
    """A Serve file of the demo model in float32. engine: more of its settings."""
    kwargs = {"max_num_seqs": 64, "device": "cpu", "dtype": "float32", "cpu_threads": 1, "devices_per_node": 1}
    args = {
        "single_node": False,
        "model_loading_config": {"model_id": "demo", "model_source": "demo"},
        "engine_kwargs": {**kwargs, **engine},
        "deployment_config": {"num_replicas": groups},
        "gateway_config": {"auth": "open", "api_server_count": 1},
    }
    application = {"name": "tandem", "route_prefix": "/", "import_path": "tandem.cluster.app:build", "args": args}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": HTTP_PORT},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
    }


def ranks_on(node: Node) -> dict[int, tuple[str, str]]:
    """The group and the place in it of each rank on a node, by process id outside of the node."""
    found = {}
    for pid in node.pids():
        try:
            words = " ".join(psutil.Process(pid).cmdline()).split()
        except psutil.Error:
            continue
        if words[:2] == ["tandem", "rank"] and words[-1] != "starting":
            found[pid] = words[2], " ".join(words[3:])
    return found
