"""Every file of configs/serve that is for clusters, deployed as it is on the nodes of compose.yaml, and asked."""

from pathlib import Path

from tests.launch.containers import Container
from tests.launch.page import blocks
from tests.launch.play_compose import NEEDS, composed
from tests.launch.play_image import ask_on
from tests.launch.play_local import KEY, check_stream
from tests.launch.record import Record, check
from tests.support.service import REPOSITORY

__all__ = ["NEEDS", "play"]
FILES = sorted(path.name for path in (REPOSITORY / "configs" / "serve").glob("*.yaml") if path.stem != "demo")
MODELS = {"lora.yaml": "shout"}
"""The model that is asked for, where it is not the demo itself."""
DEPLOYED_S = 600


def play(record: Record) -> None:
    """LaunchError where one is not deployed or does not answer."""
    *_, ask, _ = blocks("Docker Compose", KEY)
    with composed(record) as nodes:
        for name in FILES:
            deploy(record, nodes["deploy"].container, nodes["deploy"].service.environment, name)
            model = MODELS.get(name, "demo")
            question = ask.replace('"model": "demo"', f'"model": "{model}"')
            check_stream(ask_on(record, nodes["head"].container, question))


def deploy(record: Record, container: Container, environment: dict[str, str], name: str) -> None:
    """Deploys a file of the image, and returns when its version serves."""
    head = "http://head:8265"
    log = container.node.folder / "deploy.txt"
    words = ["serve", "deploy", "--address", head, f"configs/serve/{name}"]
    check(container.start(words, environment, log).wait(DEPLOYED_S) == 0, f"{name} is sent: {_said(log)}")
    status = container.node.folder / "status.txt"

    def runs() -> bool:
        status.unlink(missing_ok=True)
        container.start(["serve", "status", "--address", head, "--name", "tandem"], environment, status).wait(60)
        return "status: RUNNING" in _said(status).splitlines()

    record.wait_for(runs, DEPLOYED_S, f"{name} is RUNNING")
    record.say(" ".join(line.strip() for line in _said(status).splitlines() if "RUNNING" in line or "tandem-" in line))


def _said(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
