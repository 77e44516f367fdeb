"""configs/kuberay/service.yaml: its containers in the image, one node of a lab each, started and probed as it says."""

import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.launch import image as images
from tests.launch.compose_file import env_file
from tests.launch.containers import Container, Image
from tests.launch.page import blocks
from tests.launch.play_compose import make_files
from tests.launch.play_image import ask_on
from tests.launch.play_local import KEY, YOURS, check_stream
from tests.launch.rayservice import HEAD_SERVICE, Pod, pods, read_file
from tests.launch.record import LaunchError, Record, check
from tools.lab import Lab, Node

NEEDS = (*images.NEEDS, "curl", "openssl", "venv")
READY_S = 600
REDIS = "redis.internal"


def play(record: Record) -> None:
    """LaunchError where something is not as the page says."""
    (files,) = blocks("Files of yours", {**YOURS, **KEY})
    image = images.image(record, again=False)
    service = read_file()
    try:
        with tempfile.TemporaryDirectory(prefix="launch-") as home:
            make_files(record, files, Path(home))
            given = {f"tandem-{name}": env_file(Path(home) / ".ray" / f"{name}.env") for name in ("head", "service")}
            wanted = pods(service, given)
            names = [f"{pod.group}-{number}" for number, pod in enumerate(wanted)]
            with Lab("redis", "operator", *names) as lab:
                hosts = {lab.nodes["redis"].address: REDIS, lab.nodes[names[0]].address: HEAD_SERVICE}
                start_redis(lab.nodes["redis"], image)
                running = [
                    PodContainer(record, lab.nodes[n], image, p, hosts) for n, p in zip(names, wanted, strict=True)
                ]
                for one in running:  # the operator's init containers wait for the head; one by one, as cores are few
                    one.wait("readiness" if one is running[0] else "liveness")
                deploy(record, lab, wanted[0], service["spec"]["serveConfigV2"])
                for one in running:
                    one.wait("readiness")
                *_, ask, _ = blocks("Kubernetes", KEY)
                lines = [line for line in ask.splitlines() if not line.startswith("kubectl ")]
                check_stream(ask_on(record, running[1].container, "\n".join(lines)))
                for one in running:
                    one.wait("liveness")
    finally:
        images.release()


class PodContainer:
    """One pod's Ray container, started at the first wait(), and again when it has ended, as a kubelet does it."""

    def __init__(self, record: Record, node: Node, image: Image, pod: Pod, hosts: Mapping[str, str]) -> None:
        check(image.user != "root" and pod.user == 1000, "nothing runs as root")
        folders = [(node.folder / f"volume-{number}", place, False) for number, place in enumerate(pod.folders)]
        for folder, _, _ in folders:
            folder.mkdir()
            folder.chmod(0o777)
        self.container = Container(node, image._replace(user=str(pod.user)), pod.shm, hosts, folders)
        self._record = record
        self._pod = pod
        self._log = node.folder / "said.txt"
        self._main: subprocess.Popen[bytes] | None = None

    def wait(self, probe: str) -> None:
        """Return when a probe of its has succeeded."""
        name = self.container.node.name
        try:
            self._record.wait_for(lambda: self._succeeds(probe), READY_S, f"{name}: its {probe} probe succeeds")
        except LaunchError as error:
            raise LaunchError(f"{error}: {self._log.read_text()[-2000:]}") from error

    def _succeeds(self, probe: str) -> bool:
        if self._main is None or self._main.poll() is not None:
            again = "" if self._main is None else " again"
            self._record.say(f"{self.container.node.name}{again}: {self._pod.command}")
            command = ["/bin/bash", "-c", "--", self._pod.command]
            self._main = self.container.start(command, self._pod.environment, self._log)
        return asked(self.container.node, self._pod.probes[probe])


def start_redis(node: Node, image: Image) -> None:
    """A Redis with the users of docs/serving/cluster.md, and all prefixes of Ray for its user."""
    (users, *_) = blocks("A Redis for the head", YOURS, page="docs/serving/cluster.md")
    config = node.folder / "redis.conf"
    config.write_text(users.replace("~RAYtandem@*", "~RAY*") + f"\nbind {node.address}\n")
    redis = Container(node, image, "64m", {}, [(config, "/etc/redis.conf", True)])
    redis.start(["redis-server", "/etc/redis.conf"], {}, log=node.folder / "said.txt")


def asked(node: Node, one: Mapping[str, Any]) -> bool:
    """What the kubelet asks of a pod."""
    place = one["httpGet"]
    with node.network():
        try:
            url = f"http://{node.address}:{place['port']}{place['path']}"
            return 200 <= httpx.get(url, timeout=one["timeoutSeconds"], trust_env=False).status_code < 400
        except httpx.HTTPError:
            return False


def deploy(record: Record, lab: Lab, head: Pod, config: str) -> None:
    """Sends the Serve file to the head's dashboard, as the operator does, and waits until it runs."""
    url = f"http://{lab.nodes['head-0'].address}:8265/api/serve/applications/"
    key = {"authorization": f"Bearer {head.environment['RAY_AUTH_TOKEN']}"}
    with lab.nodes["operator"].network():
        check(httpx.get(url, timeout=60, trust_env=False).status_code in (401, 403), "nobody deploys without the token")
        answer = httpx.put(url, json=yaml.safe_load(config), headers=key, timeout=120, trust_env=False)
        check(answer.status_code == 200, f"the application is taken: {answer.text}")
        record.say("the application was sent")
        state, deadline_s = "", time.monotonic() + READY_S
        while state != "RUNNING" and time.monotonic() < deadline_s:
            found = httpx.get(url, headers=key, timeout=60, trust_env=False).json()
            state = found["applications"].get("tandem", {}).get("status", "")
            check(state != "DEPLOY_FAILED", f"it is deployed: {found['applications'].get('tandem', {}).get('message')}")
            time.sleep(1)
    check(state == "RUNNING", "the application runs")
    record.say("the application is RUNNING")
