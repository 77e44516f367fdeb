"""Nodes of a lab as machines of a cluster: a user with a home, /tmp and /run of their own, sshd, pip without index."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.launch.needs import PATH, which
from tests.launch.record import Record
from tests.launch.wheels import PLACE
from tests.support.service import BIN, REPOSITORY
from tools.lab import Node

UID = 2000
WHEELS_AT = "/srv"
DISK_AT = "/mnt"
WARM = PLACE / "tandem-env"
PIP = f"[install]\nno-index = true\nno-compile = true\nfind-links = {WHEELS_AT}\n"
"""Modules are compiled as they are imported: most are not."""
SSHD = f"""
HostKey {DISK_AT}/host_key
PidFile none
UsePAM no
PermitRootLogin no
PasswordAuthentication no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""
MOUNTS = f"""
mount --bind "$1" {DISK_AT}
mount --bind "$2" {WHEELS_AT}
mount --bind {DISK_AT}/home /home
for file in passwd group shadow hosts resolv.conf; do mount --bind "{DISK_AT}/$file" "/etc/$file"; done
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
chmod 1777 {DISK_AT}/tmp
mount --bind {DISK_AT}/tmp /tmp
"""
INSTALLED = f"""
earlier=$1 place=/home/$2/{WARM.name}
mkdir {DISK_AT}/upper {DISK_AT}/work "$place"
chown {UID}:{UID} {DISK_AT}/upper
mount -t overlay overlay -o "lowerdir=$earlier,upperdir={DISK_AT}/upper,workdir={DISK_AT}/work" "$place"
grep -lIs /home/ "$place"/pyvenv.cfg "$place"/bin/* "$place"/lib/python3*/site-packages/*editable* |
  xargs sed -i "s#/home/[a-z]*/#/home/$2/#g"
"""
NETWORK = """
ip address flush dev eth0
for address in "$@"; do ip address add "$address/24" dev eth0; done
ip route add default dev eth0 src "$1"
"""


class Machine:
    """A node of a lab with a disk of its own. user: who works there; the machine has root and them. addresses: at which
    it is reached, the first its own. hosts: names of others, by address. Its default route is the lab's switch, where
    nobody answers for the world."""

    def __init__(
        self, node: Node, user: str, addresses: Sequence[str], wheels: Path, hosts: Mapping[str, str] = {}
    ) -> None:
        self.node = node
        self.user = user
        self.address = addresses[0]
        self.disk = node.folder / "disk"
        self.home = Path("/home") / user
        home = self.disk / "home" / user
        shutil.copytree("/etc/skel", home)
        (self.disk / "tmp").mkdir()
        pip = home / ".config" / "pip" / "pip.conf"
        pip.parent.mkdir(parents=True)
        pip.write_text(PIP)
        _own(self.disk / "home" / user)
        self._write_accounts(hosts)
        node.run("bash", "-ec", NETWORK, "network", *addresses)
        node.run("bash", "-ec", MOUNTS, "mounts", str(self.disk), str(wheels))
        if WARM.exists():
            node.run("bash", "-ec", INSTALLED, "installed", str(WARM), user)

    def write_files(self, folder: str, files: Mapping[str, str]) -> None:
        """Files of a folder in the user's home, by name."""
        place = self.disk / "home" / self.user / folder
        place.mkdir(mode=0o700)
        for name, text in files.items():
            (place / name).write_text(text)
            (place / name).chmod(0o600)
        _own(place)

    def start_sshd(self, key: str) -> None:
        """Let who has the private half of this key log in as the machine's user."""
        self.write_files(".ssh", {"authorized_keys": key})
        made = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.disk / "host_key")]
        subprocess.run(made, check=True)
        (self.disk / "sshd_config").write_text(SSHD)
        self.start([which("sshd"), "-D", "-e", "-f", f"{DISK_AT}/sshd_config"], log="sshd.log")

    def start(self, words: Sequence[str], env: Mapping[str, str] = {}, log: str = "") -> "subprocess.Popen[str]":
        """Start a program as root, with its output to read, or in a file of the machine's disk."""
        if not log:
            return self._popen(words, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with (self.disk / log).open("w") as file:
            return self._popen(words, env, stdout=file, stderr=file)

    def shell(self, record: Record, command: str, timeout_s: float = 600) -> str:
        """Run a command as who sits there would, in the checkout, with `ray` and `tandem` of its environment in PATH;
        return what it said. LaunchError if it fails."""
        env = {"PATH": f"{BIN}:{PATH}", "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0", "COLUMNS": "120"}
        here = ["bash", "-ec", 'cd "$0" && eval "$1"', str(REPOSITORY), command]
        return record.told(self.start(here, env), command, timeout_s)

    def processes(self) -> list[str]:
        """The commands that run there, without the machine's first process and its sshd."""
        pids = self.node.pids()
        found = []
        for pid in pids - {min(pids)}:
            try:
                words = psutil.Process(pid).cmdline()
            except psutil.Error:
                continue
            if words and not words[0].startswith(("sshd:", which("sshd"))):
                found.append(" ".join(words))
        return found

    def _popen(self, words: Sequence[str], env: Mapping[str, str] = {}, **options: Any) -> "subprocess.Popen[Any]":
        own = {"PATH": PATH, "HOME": str(self.home), "LANG": "C.UTF-8"}
        words = self.node.command(words)
        return subprocess.Popen(
            words, env={**own, **env}, cwd=REPOSITORY, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )

    def _write_accounts(self, hosts: Mapping[str, str]) -> None:
        """Accounts of the machine that this is played on, and the user."""
        lines = {
            "passwd": f"{self.user}:x:{UID}:{UID}::{self.home}:/bin/bash\n",
            "group": f"{self.user}:x:{UID}:\n",
            "shadow": f"{self.user}:*:19000::::::\n",
        }
        for name, line in lines.items():
            known = (Path("/etc") / name).read_text().replace(":/root:", f":{self.home}:")  # where ssh looks for keys
            (self.disk / name).write_text(known + line)
        (self.disk / "shadow").chmod(0o600)
        names = "".join(f"{address} {name}\n" for address, name in hosts.items())
        own = f"127.0.0.1 localhost\n{self.address} {self.node.name}\n"
        (self.disk / "hosts").write_text(f"{own}{names}")
        (self.disk / "resolv.conf").write_text("")


def keep_installed(machine: Machine) -> None:
    """Keep what a machine has installed for those of later launches, which are then machines that were used before. It
    is the user's there too."""
    subprocess.run(["cp", "-a", machine.disk / "home" / machine.user / WARM.name, WARM], check=True)


def _own(folder: Path) -> None:
    """Makes a folder the user's, closed to others, as sshd wants it."""
    folder.chmod(0o700)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID)
