"""Shipped cluster and Serve files against Ray's own schemas."""

import copy
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
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
    assert all("--dashboard-host=127.0.0.1" in c for c in commands if "--head" in c)


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
