"""Shipped cluster and Serve files against Ray's own schemas."""

import copy
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tandem.configs.bundled import read_switches
from tandem.configs.load import settings_from_serve_args
from tandem.configs.schema import ServiceSettings
from tests.lab.ray_nodes import PORTS
from tests.support.service import wait_for

LAUNCHERS = {
    "local": (), "aws": ("boto3",), "gcp": ("google-api-python-client", "google-auth", "cryptography"),
}  # fmt: skip
"""What the head needs to launch nodes, by provider."""
ROOT = Path(__file__).resolve().parents[4]
CONFIGS = ROOT / "configs"
CLUSTERS = sorted((CONFIGS / "cluster").glob("*.yaml"))
SERVES = sorted((CONFIGS / "serve").glob("*.yaml"))


def check_cluster(config: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.autoscaler._private.util import prepare_config, validate_config
    validate_config(prepare_config(copy.deepcopy(config)))


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_cluster_files_validate(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    check_cluster(config)
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    starts = [c for c in commands if "ray start -" in c and not c.startswith("pkill")]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in c for c in starts), "no cluster without a token"
    assert all("ulimit -n 65536 || ulimit -n $(ulimit -Hn); " in c.partition("ray start")[0] for c in starts)
    for command in starts:
        assert all(name not in command for name in read_switches()), "they are in one file"
        assert command.startswith("set -a; . ~/tandem/configs/switches.env; . ~/.ray/service.env; ")
        assert [word for word in command.split() if re.fullmatch(r"--[a-z-]+-port=\d+", word)] == [*PORTS], (
            "a raylet waits 15 s for each of these agents that is to choose its port, and ends then"
        )
    head, _ = starts
    assert "--dashboard-host=127.0.0.1" in head and ". ~/.ray/head.env" in head
    assert [c for c in commands if "redis" in c] == [head], "only the head is to know Ray's own Redis"
    assert "rm -f ~/.ray/head.env" in config["worker_start_ray_commands"], "nor may workers keep its password"
    assert ("RAY_enable_autoscaler_v2=0" in head) == (path.stem == "local"), "it would start a worker too few there"


@pytest.mark.parametrize("ends_well", [True, False])
@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_ray_on_the_head_is_started_again_until_it_ends_in_order(path: Path, ends_well: bool, tmp_path: Path) -> None:
    """The shipped command, with another `ray`, which fails twice, and files of an operator. A third time it ends as a
    part of it does that `ray stop` waited for, or had to kill."""
    home = tmp_path / "home"
    (home / "tandem" / "configs").mkdir(parents=True)
    (home / ".ray").mkdir()
    for name in ("switches.env", "cluster"):
        (home / "tandem" / "configs" / name).symlink_to(CONFIGS / name)
    (home / "ray_bootstrap_config.yaml").symlink_to(path)
    (home / ".ray" / "service.env").write_text("TANDEM_REDIS_URL=redis://r\n")
    (home / ".ray" / "head.env").write_text(
        "RAY_REDIS_ADDRESS=r:6379\nRAY_REDIS_USERNAME=ray\nRAY_REDIS_PASSWORD='a b'\n"
    )
    called, tools = home / "called", home / "bin"
    tools.mkdir()
    (home / "ray").mkdir()
    running = home / "ray" / "ray_current_cluster"
    running.touch()
    ending = f"{{ touch {home}/over; exit 0; }}" if ends_well else f"{{ rm {running}; touch {home}/over; }}"
    for name, text in (
        ("ray", f'printf "%s|" "$@" $RAY_REDIS_ADDRESS $RAY_AUTH_MODE >> {called}; echo >> {called}\n'
                f"test $(wc -l < {called}) -lt 3 || {ending}\nfalse\n"),
        ("pgrep", "false\n"),
        ("sleep", "true\n"),
        ("ssh", f'echo "$@" >> {home}/told\n'),
        ("python", f'exec {sys.executable} "$@"\n'),
    ):  # fmt: skip
        (tools / name).write_text(f"#!/bin/sh\n{text}")
        (tools / name).chmod(0o755)

    def told() -> list[str]:
        return (home / "told").read_text().splitlines()

    command = yaml.safe_load(path.read_text())["head_start_ray_commands"][-1]
    env = {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}", "RAY_TMPDIR": str(home)}
    assert subprocess.run(["bash", "-c", command], env=env, timeout=30).returncode == 0, "it does not wait"
    wait_for((home / "over").exists, 30, "it was started until it ended in order")
    lines = called.read_text().splitlines()
    assert len(lines) == 3 and len(set(lines)) == 1
    assert lines[0].startswith("start|--head|--port=6379|") and lines[0].endswith("|--block|r:6379|token|")
    assert "|--redis-username=ray|--redis-password=a b|" in lines[0]
    if path.stem == "local":
        workers = yaml.safe_load(path.read_text())["provider"]["worker_ips"]
        wait_for(lambda: (home / "told").exists() and len(told()) == len(workers), 30, "the workers' Ray is stopped")
        assert all(any(f"@{address} bash --login -c 'ray stop'" in line for line in told()) for address in workers)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_nodes_install_this_checkout_and_nothing_of_our_name_from_an_index(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    commands = [c for key in config if key.endswith("_commands") for c in config[key]]
    assert not [c for c in commands if re.search("tandem[-_.]serve", c)], project["project"]["name"]
    installs = [c.split("pip install ")[1].split() for c in commands if "pip install" in c]
    constraints = "~/tandem/constraints.txt"
    launcher = LAUNCHERS[config["provider"]["type"]]
    wanted = [[*launcher] if launcher else [], ["torch"], ["-e", "~/tandem"]]
    assert sorted(installs) == sorted([["--quiet", "-c", constraints, *words] for words in wanted if words])


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_all_that_an_installation_needs_is_mounted(path: Path) -> None:
    mounts: dict[str, str] = yaml.safe_load(path.read_text())["file_mounts"]
    ours = {remote.removeprefix("~/tandem/"): local for remote, local in mounts.items() if "/tandem/" in remote}
    assert all(remote == local and (ROOT / local).exists() for remote, local in ours.items())
    secret = {f"~/.ray/{name}" for name in ("auth_token", "head.env", "service.env")}
    assert set(mounts) - {f"~/tandem/{name}" for name in ours} == secret
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tops = {path.name for path in (ROOT / "tandem").iterdir() if path.is_symlink()}
    needed = {"tandem", *tops, *project["project"]["license-files"], project["project"]["readme"]}
    assert set(ours) == {*needed, "pyproject.toml", "setup.py", "constraints.txt"}
    deployed = re.findall(r"~/tandem/(configs/serve/\S+\.yaml)", (ROOT / "docs" / "serving" / "launch.md").read_text())
    assert deployed and all((ROOT / name).is_file() and name.split("/")[0] in ours for name in deployed)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_the_check_would_catch_a_typo(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    config["max_worker"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check_cluster(config)


@pytest.mark.parametrize("path", SERVES, ids=lambda p: p.stem)
def test_serve_files_validate(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.serve.schema import ServeDeploySchema
    schema = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
    (application,) = schema.applications
    settings = settings_from_serve_args(application.args)
    assert application.name == "tandem"
    if path.stem == "demo":
        assert schema.http_options.host == "127.0.0.1", "it is open"
        return
    check_for_a_cluster(schema.http_options.host, application.args, settings)


def check_for_a_cluster(host: str, args: dict[str, Any], settings: ServiceSettings) -> None:
    """What holds for every service of several nodes: others reach it, with keys, by reference."""
    assert host == "0.0.0.0" and settings.gateway.auth != "open" and settings.gateway.api_keys, "who is let in"
    assert all(key.startswith(("env:", "file:")) for key in settings.gateway.api_keys), "nobody else's eyes"
    assert settings.redis.url == "env:TANDEM_REDIS_URL", "the head's own Redis dies with it"
    assert not args["single_node"] and settings.gateway.num_gateways > 1
