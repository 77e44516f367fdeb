"""The image of configs/docker/Dockerfile, built by buildah on a base that mmdebstrap makes."""

import json
import os
import subprocess
from pathlib import Path

from tests.launch.containers import Image
from tests.launch.needs import which
from tests.launch.record import Record
from tests.launch.wheels import PLACE, wheel_folder
from tests.support.service import REPOSITORY

NEEDS = ("buildah", "mmdebstrap")
BASE, TAG = "localhost/launch-base", "localhost/tandem"
BUILD_S = 1800


def image(record: Record, again: bool) -> Image:
    """The image, built anew if asked or if there is none; its files stay mounted until release()."""
    if again or not _said("images", "--quiet", "--filter", f"reference={TAG}"):
        build(record)
    name = _said("from", "--name", "launch-player", "--pull-never", TAG)
    root = Path(_said("mount", name))
    config = json.loads(_said("inspect", "--type", "container", name))["OCIv1"]["config"]
    environment = dict(one.split("=", 1) for one in config["Env"])
    return Image(root, config["User"], config["WorkingDir"], environment, config["Entrypoint"], config.get("Cmd") or [])


def release() -> None:
    """Unmounts the image's files. Idempotent."""
    subprocess.run([which("buildah"), "rm", "launch-player"], capture_output=True, timeout=60)


def build(record: Record) -> None:
    """Builds base and image; the Dockerfile is used as it is, and pip takes what its build arguments say."""
    wheels = wheel_folder()
    if not _said("images", "--quiet", "--filter", f"reference={BASE}"):
        tree = PLACE / "base.tar"
        suite = "$(. /etc/os-release; echo $VERSION_CODENAME)"
        run(
            record,
            f"mmdebstrap --variant=apt --mode=root {suite} {tree} $(find /etc/apt -name '*.list' -o -name '*.sources')",
        )
        run(record, f"printf 'FROM scratch\\nADD base.tar /\\n' | buildah bud -q -t {BASE} -f - {PLACE}")
        tree.unlink()
    arguments = f"--build-arg BASE={BASE} --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels"
    run(
        record,
        f"buildah bud --isolation chroot {arguments} -v {wheels}:/wheels:ro -f configs/docker/Dockerfile -t {TAG} .",
    )
    size = json.loads(_said("images", "--json", "--filter", f"reference={TAG}"))[0]["size"]
    record.say(f"the image has {size}")


def run(record: Record, command: str) -> None:
    """Runs a command of the machine's shell, on the machine."""
    process = subprocess.Popen(
        ["bash", "-ec", command], cwd=REPOSITORY, env={**os.environ}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    record.told(process, command, BUILD_S)


def _said(*words: str) -> str:
    command = [which("buildah"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.strip()
