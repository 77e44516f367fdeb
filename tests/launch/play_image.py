"""configs/docker/Dockerfile: the image is built, and its entry serves on a node of a lab."""

import os
import subprocess

from tests.launch import image as images
from tests.launch.containers import Container
from tests.launch.page import blocks
from tests.launch.play_local import KEY, check_stream
from tests.launch.record import Record, check
from tools.lab import Lab

NEEDS = (*images.NEEDS, "curl", "venv")
ASK_S, END_S = 600, 60


def play(record: Record) -> None:
    """LaunchError where something is not as the page says."""
    run, ask = blocks("One container", KEY)
    check(run.startswith("docker build -f configs/docker/Dockerfile"), "the page builds this file")
    image = images.image(record, again=True)
    try:
        with Lab("container") as lab:
            node = lab.nodes["container"]
            container = Container(node, image, "4g")
            words = [*image.entrypoint, *image.command]
            record.say(f"as user {image.user}: {' '.join(words)}")
            log = node.folder / "said.txt"
            main = container.start(words, {"TANDEM_API_KEY": KEY["API-KEY"]}, log)
            check_stream(ask_on(record, container, ask))
            record.say(f"it said: {log.read_text().strip()}")
            owners = {os.stat(f"/proc/{pid}").st_uid for pid in node.pids() - {min(node.pids())}}
            check(owners == {1000}, f"nothing of it runs as root, but as {owners}")
            container.terminate(main)
            main.wait(END_S)
            record.wait_for(lambda: len(node.pids()) == 1, END_S, "SIGTERM ended it and all that it had started")
    finally:
        images.release()


def ask_on(record: Record, container: Container, commands: str) -> str:
    """Run the page's question on the container's node; return the answer."""
    process = subprocess.Popen(
        container.node.command(["bash", "-ec", commands]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return record.told(process, commands, ASK_S)
