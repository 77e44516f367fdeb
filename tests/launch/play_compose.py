"""configs/docker/compose.yaml: its services in the image, one node of a lab each, as the file starts and checks."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.launch import image as images
from tests.launch.compose_file import ComposeService, read
from tests.launch.containers import Container
from tests.launch.page import blocks
from tests.launch.play_image import ask_on
from tests.launch.play_local import KEY, YOURS, check_stream
from tests.launch.record import LaunchError, Record, check
from tests.support.service import REPOSITORY
from tools.lab import Lab

NEEDS = (*images.NEEDS, "curl", "openssl", "venv")
OWNER = 1000
HEALTHY_S = 300


def play(record: Record) -> None:
    """LaunchError where something is not as the page says."""
    _, up, ask, _ = blocks("Docker Compose", KEY)
    check(up.startswith("docker compose -f configs/docker/compose.yaml up"), "the page starts this file")
    with composed(record) as nodes:
        check_stream(ask_on(record, nodes["head"].container, ask))


class ComposeNode(NamedTuple):
    """A service and the container that it is here."""

    service: ComposeService
    container: Container


@contextmanager
def composed(record: Record) -> Iterator[dict[str, ComposeNode]]:
    """The services of the file by name, started with the page's files of ~/.ray; gone at the end."""
    (files,) = blocks("Files of yours", {**YOURS, **KEY})
    redis, *_ = blocks("Docker Compose", YOURS)
    image = images.image(record, again=False)
    try:
        with tempfile.TemporaryDirectory(prefix="launch-") as home:
            make_files(record, f"{files}\n{redis}", Path(home))
            services = read(Path(home))
            with Lab(*services) as lab:
                hosts = {lab.nodes[name].address: " ".join([name, *one.names]) for name, one in services.items()}
                nodes = {
                    name: ComposeNode(one, Container(lab.nodes[name], image, one.shm, hosts, one.binds))
                    for name, one in services.items()
                }
                start_in_order(record, nodes)
                yield nodes
    finally:
        images.release()


def make_files(record: Record, commands: str, home: Path) -> None:
    """The page's commands make the files of ~/.ray, whose owner is the image's user."""
    made = subprocess.Popen(
        ["bash", "-ec", commands], cwd=REPOSITORY, env={**os.environ, "HOME": str(home)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    record.told(made, commands, 60)
    for path in (home, *home.rglob("*")):
        os.chown(path, OWNER, OWNER)


def start_in_order(record: Record, nodes: Mapping[str, ComposeNode]) -> None:
    """Starts what waits for nothing, then what waited for that."""
    done = set[str]()
    while rest := [name for name in nodes if name not in done]:
        name = next(one for one in rest if done.issuperset(nodes[one].service.after))
        record.say(f"{name}: {' '.join(nodes[name].service.command)}")
        start(record, name, *nodes[name])
        done.add(name)


def start(record: Record, name: str, service: ComposeService, container: Container) -> None:
    """Starts one, and returns when it is healthy. What does not last is run again until it has ended well."""
    log = container.node.folder / "said.txt"
    try:
        if service.is_lasting:
            main = container.start(service.command, service.environment, log)
            record.wait_for(lambda: is_healthy(service, container, main), HEALTHY_S, f"{name} is healthy")
        else:
            record.wait_for(lambda: ends_well(service, container, log), HEALTHY_S, f"{name} ended well")
            record.say(log.read_text().strip())
    except LaunchError as error:
        raise LaunchError(f"{error}: {log.read_text()[-2000:]}") from error


def is_healthy(service: ComposeService, container: Container, main: subprocess.Popen[bytes]) -> bool:
    """What the file's check says; LaunchError if the container has ended."""
    check(main.poll() is None, f"{' '.join(service.command)} runs")
    return container.start(service.health, service.environment, log=Path(os.devnull)).wait(60) == 0


def ends_well(service: ComposeService, container: Container, log: Path) -> bool:
    """Runs what ends by itself."""
    log.unlink(missing_ok=True)
    return container.start(service.command, service.environment, log).wait(HEALTHY_S) == 0
