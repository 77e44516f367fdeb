"""`ray up configs/cluster/local.yaml` on three machines of a lab, a streamed answer, `ray down`."""

import subprocess
from pathlib import Path

from tandem.cluster.process.redis_server import find_binary
from tests.launch.machines import WARM, Machine, keep_installed
from tests.launch.page import blocks
from tests.launch.record import Record, check
from tests.launch.wheels import wheel_folder
from tools.lab import Lab

NEEDS = ("sshd", "ssh", "ssh-keygen", "rsync", "curl", "openssl", "venv")
REDIS, HEAD, WORKERS = "192.0.2.3", "192.0.2.10", ("192.0.2.11", "192.0.2.12")
"""Those of the file."""
YOURS = {"PASSWORD1": "a-word-of-ray", "PASSWORD2": "a-word-of-tandem"}
KEY = {"API-KEY": "a-key-for-clients"}
HEAD_ENV = "home/tandem/.ray/head.env"
UP_S, DEPLOY_S, DOWN_S = 1800, 600, 180


def play(record: Record) -> None:
    """LaunchError where something is not as the page says."""
    wheels = wheel_folder()
    record.say(f"the machines of the cluster have {'what an earlier launch installed' if WARM.exists() else 'nothing'}")
    with Lab("you", "redis", "head", "first", "second") as lab:
        hosts = {REDIS: "redis.internal"}
        you = Machine(lab.nodes["you"], "you", ["192.0.2.2"], wheels, hosts)
        start_redis(Machine(lab.nodes["redis"], "redis", [REDIS], wheels))
        key = make_key(you)
        cluster = []
        for name, address in zip(("head", "first", "second"), (HEAD, *WORKERS), strict=True):
            machine = Machine(lab.nodes[name], "tandem", [address], wheels, hosts)
            machine.start_sshd(key)
            cluster.append(machine)
        launch_and_ask(you, record)
        secrets = {machine.address for machine in cluster if (machine.disk / HEAD_ENV).exists()}
        check(secrets == {HEAD}, f"Ray's Redis is known to the head alone, not to {secrets}")
        if not WARM.exists():
            keep_installed(cluster[0])
        *_, down = blocks("Machines with ssh")
        you.shell(record, down, DOWN_S)
        for machine in cluster:
            record.wait_for(lambda of=machine: not of.processes(), DOWN_S, f"nothing runs on {machine.address}")


def launch_and_ask(you: Machine, record: Record) -> None:
    """The section's commands, up to its answer."""
    (files,) = blocks("Files of yours", {**YOURS, **KEY})
    you.shell(record, files)
    up, ask, _ = blocks("Machines with ssh", KEY)
    you.shell(record, up, UP_S)
    check_stream(you.shell(record, ask, DEPLOY_S))


def check_stream(answer: str) -> None:
    """LaunchError if this is no stream of a chat that has ended well."""
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    check(len(events) > 5 and events[-1] == "[DONE]", "an answer was streamed to its end")
    check('"chat.completion.chunk"' in events[0], "it is a chat's")


def make_key(you: Machine) -> str:
    """The public half of a key that `you` has where local.yaml says."""
    folder = you.disk / "home" / "you" / ".ssh"
    folder.mkdir(mode=0o700)
    private = folder / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(private)], check=True)
    return Path(f"{private}.pub").read_text()


def start_redis(machine: Machine) -> None:
    """A Redis with the users of docs/serving/cluster.md."""
    (users, *_) = blocks("A Redis for the head", YOURS, page="docs/serving/cluster.md")
    (machine.disk / "tmp" / "redis.conf").write_text(f"bind {machine.address}\nport 6379\ndir /tmp\n{users}\n")
    machine.start([str(find_binary()), "/tmp/redis.conf"], log="redis.log")
