"""Files of what cannot be launched here, against the schemas of those who would: pods, Compose, Compute Engine."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.launch import compose_file, rayservice
from tests.launch.record import Record, check
from tests.launch.wheels import environment
from tests.support.service import REPOSITORY

NEEDS: tuple[str, ...] = ()
KUBERNETES = ("kubernetes-validate>=1.31,<2",)
GOOGLE = ("google-api-python-client>=2.150,<3",)
DOCUMENT = """
import pathlib, googleapiclient.discovery_cache as cache
print((pathlib.Path(cache.__file__).parent / "documents" / "compute.v1.json").read_text())
"""
CHECK_S = 120


def play(record: Record) -> None:
    """LaunchError where a file has what its schema has not."""
    check_pods(record)
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / ".ray").mkdir()
        for name in ("service.env", "head.env", "auth_token", "redis.conf"):
            (Path(home) / ".ray" / name).touch()
        services = compose_file.read(Path(home))
    record.say(f"Docker Compose takes {compose_file.FILE.name}: {', '.join(services)}")
    check_compute_engine(record)


def check_pods(record: Record) -> None:
    """The pod templates of the RayService, by the schemas of the newest Kubernetes that the checker knows."""
    place = environment("kubernetes", KUBERNETES)
    cluster = rayservice.read_file()["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        name = group.get("groupName", "head")
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": group["template"]["spec"]}
        check(_kubernetes_takes(place, pod), f"the pods of group {name} have Kubernetes' fields alone")
        pod["spec"]["containers"][0]["enviroment"] = []
        check(not _kubernetes_takes(place, pod), "and that would be noticed")
        record.say(f"Kubernetes takes the pods of group {name}")


def check_compute_engine(record: Record) -> None:
    """The nodes of gcp.yaml, by the API's description that Google's client has in it."""
    place = environment("google", GOOGLE)
    said = subprocess.run([place / "bin" / "python", "-c", DOCUMENT], capture_output=True, text=True, check=True)
    schemas = json.loads(said.stdout)["schemas"]
    config = yaml.safe_load((REPOSITORY / "configs" / "cluster" / "gcp.yaml").read_text())
    for name, kind in config["available_node_types"].items():
        wrong = [*misfits(kind["node_config"], {"$ref": "Instance"}, schemas, name)]
        check(not wrong, f"Compute Engine has these fields: {wrong}")
        record.say(f"Compute Engine has the fields of node type {name}")
    check([*misfits({"disks": [{"boots": True}]}, {"$ref": "Instance"}, schemas, "x")] == ["x.disks.boots"], "noticed")


def misfits(value: Any, schema: dict[str, Any], schemas: dict[str, Any], path: str) -> list[str]:
    """Fields of a value that the description has not, or whose kind is another."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    kinds = {"object": dict, "array": list, "string": str | int, "integer": int, "boolean": bool, "number": float}
    if not isinstance(value, kinds[schema["type"]]):
        return [path]
    if isinstance(value, list):
        return [one for item in value for one in misfits(item, schema["items"], schemas, path)]
    if not isinstance(value, dict):
        return []
    known = schema.get("properties", {})
    found = [f"{path}.{name}" for name in value if name not in known]
    for name in value.keys() & known.keys():
        found += misfits(value[name], known[name], schemas, f"{path}.{name}")
    return found


def _kubernetes_takes(place: Path, pod: dict[str, Any]) -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(pod, file)
        file.flush()
        command = [place / "bin" / "kubernetes-validate", "--strict", file.name]
        return subprocess.run(command, capture_output=True, timeout=CHECK_S).returncode == 0
