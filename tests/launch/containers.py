"""Containers of an image on nodes of a lab: its files under a layer of their own, an environment, a user, an entry.

The image is a folder with a root file system, as `buildah mount` gives it. What a container's runtime does beside
(cgroups, seccomp, capabilities) is not done.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from tools.lab import Node

ROOT = "/mnt"
MOUNTS = f"""
image=$1 layer=$2 shm=$3
mkdir -p "$layer/upper" "$layer/work"
mount -t overlay overlay -o "lowerdir=$image,upperdir=$layer/upper,workdir=$layer/work" {ROOT}
mount -t proc proc {ROOT}/proc
mount --bind /sys {ROOT}/sys
mount -t tmpfs -o mode=755 tmpfs {ROOT}/dev
mkdir {ROOT}/dev/shm
for device in null zero full random urandom tty; do
  touch "{ROOT}/dev/$device"
  mount --bind "/dev/$device" "{ROOT}/dev/$device"
done
ln -s /proc/self/fd {ROOT}/dev/fd
ln -s /proc/self/fd/1 {ROOT}/dev/stdout
ln -s /proc/self/fd/2 {ROOT}/dev/stderr
mount -t tmpfs -o "size=$shm,mode=1777" tmpfs {ROOT}/dev/shm
chmod 1777 {ROOT}/tmp
cat "$layer/hosts" > {ROOT}/etc/hosts
: > {ROOT}/etc/resolv.conf
"""
BIND = """
mkdir -p "$(dirname "$2")"
if [ -d "$1" ]; then mkdir -p "$2"; else touch "$2"; fi
mount --bind "$1" "$2"
if [ -n "$3" ]; then mount -o remount,bind,ro "$2"; fi
"""


class Image(NamedTuple):
    """root: its files. user, folder, environment, entrypoint, command: as its configuration says."""

    root: Path
    user: str
    folder: str
    environment: Mapping[str, str]
    entrypoint: Sequence[str]
    command: Sequence[str]


class Container:
    """One container on a node that it has for itself. shm: the size of its /dev/shm, as mount takes it. hosts: names of
    others, by address. binds: what of this machine is where in it, and whether it may only be read."""

    def __init__(
        self,
        node: Node,
        image: Image,
        shm: str,
        hosts: Mapping[str, str] = {},
        binds: Sequence[tuple[Path, str, bool]] = (),
    ) -> None:
        self.node = node
        self.image = image
        layer = node.folder / "layer"
        layer.mkdir()
        names = "".join(f"{address} {name}\n" for address, name in hosts.items())
        (layer / "hosts").write_text(f"127.0.0.1 localhost\n{node.address} {node.name}\n{names}")
        node.run("ip", "route", "add", "default", "dev", "eth0")
        node.run("bash", "-ec", MOUNTS, "mounts", str(image.root), str(layer), shm)
        for source, target, is_read_only in binds:
            node.run("bash", "-ec", BIND, "bind", str(source), f"{ROOT}{target}", "ro" if is_read_only else "")

    def start(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a program in it, as the image's user, whose output goes to a file. environment: beside the image's."""
        account = self._account()
        home = {"HOME": account[5], "HOSTNAME": self.node.name}
        whole = {**home, **self.image.environment, **environment}
        setting = ["env", "-i", *(f"{name}={value}" for name, value in whole.items())]
        place = ["sh", "-c", 'cd "$0" && exec "$@"', self.image.folder]
        into = ["chroot", f"--userspec={account[2]}:{account[3]}", ROOT, *setting, *place, *words]
        with log.open("ab") as file:
            return subprocess.Popen(
                self.node.command(into), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def terminate(self, main: subprocess.Popen[bytes]) -> None:
        """Send SIGTERM to a program that start() began."""
        (inside,) = psutil.Process(main.pid).children()
        inside.terminate()

    def _account(self) -> list[str]:
        """The line of its user, by name or number, in the image's /etc/passwd."""
        lines = [line.split(":") for line in (self.image.root / "etc" / "passwd").read_text().splitlines()]
        return next(line for line in lines if self.image.user in (line[0], line[2]))


def file_of(folder: Path, name: str, text: str, uid: int) -> Path:
    """A file of mode 400 for a container to read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o400)
    os.chown(path, uid, uid)
    return path
