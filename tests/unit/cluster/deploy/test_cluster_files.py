"""Shipped cluster and Serve files against Ray's own schemas."""

import copy
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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
    assert all("RAY_AUTH_MODE=token" in c for c in commands if "ray start" in c), "no cluster without a token"
    assert all(" grpc_proxy= " in c for c in commands if "ray start" in c), "Serve's own proxies would ask one"
    assert all("--dashboard-host=127.0.0.1" in c for c in commands if "--head" in c)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_nodes_install_this_checkout_and_nothing_of_our_name_from_an_index(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    commands = [c for key in config if key.endswith("_commands") for c in config[key]]
    assert not [c for c in commands if re.search("tandem[-_.]serve", c)], project["project"]["name"]
    installs = [c.split("pip install ")[1].split() for c in commands if "pip install" in c]
    constraints = "~/tandem/constraints.txt"
    assert installs == [["--quiet", "-c", constraints, "torch"], ["--quiet", "-c", constraints, "-e", "~/tandem"]]


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_all_that_an_installation_needs_is_mounted(path: Path) -> None:
    mounts: dict[str, str] = yaml.safe_load(path.read_text())["file_mounts"]
    ours = {remote.removeprefix("~/tandem/"): local for remote, local in mounts.items() if "/tandem/" in remote}
    assert all(remote == local and (ROOT / local).exists() for remote, local in ours.items())
    assert set(mounts) - {f"~/tandem/{name}" for name in ours} == {"~/.ray/auth_token"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tops = {path.name for path in (ROOT / "tandem").iterdir() if path.is_symlink()}
    needed = {"tandem", *tops, *project["project"]["license-files"], project["project"]["readme"]}
    assert set(ours) == {*needed, "pyproject.toml", "setup.py", "constraints.txt"}
    deployed = re.findall(r"serve deploy ~/tandem/(\S+\.yaml)", path.read_text())
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
    assert [app.name for app in schema.applications] == ["tandem"]
    assert schema.http_options.host == "127.0.0.1"
