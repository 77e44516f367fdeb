"""configs/kuberay/service.yaml as KubeRay's operator makes pods of it: commands, environment, volumes, probes.

What the operator adds is written here by what it documents and does (1.6, its file controllers/ray/common/pod.go): `ray
start` from rayStartParams and the container's limits, the address of the head, the token's Secret, the options of fault
tolerance. The operator itself is not run.
"""

import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from tests.support.service import REPOSITORY

FILE = REPOSITORY / "configs" / "kuberay" / "service.yaml"
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
HEAD_SERVICE = "tandem-head-svc"
Secrets = Mapping[str, Mapping[str, str]]


class Pod(NamedTuple):
    """command: of its Ray container. shm: bytes of its /dev/shm. folders: where its other volumes are."""

    group: str
    command: str
    environment: dict[str, str]
    shm: str
    folders: list[str]
    user: int
    probes: dict[str, dict[str, Any]]


def read_file() -> dict[str, Any]:
    """The object as it stands in the file."""
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def pods(service: Mapping[str, Any], given: Secrets) -> list[Pod]:
    """The head's pod, and as many of each group as the file asks for. given: the Secrets, by name. KeyError for a
    Secret, or a key of one, that is not there."""
    cluster = service["spec"]["rayClusterConfig"]
    given = {**given, "tandem": {"auth_token": secrets.token_hex(32)}}
    head = cluster["headGroupSpec"]
    found = [_pod("head", head, _environment_of_head(cluster, given), given)]
    for group in cluster["workerGroupSpecs"]:
        added = {"FQ_RAY_IP": HEAD_SERVICE, "RAY_IP": HEAD_SERVICE, "RAY_ADDRESS": f"{HEAD_SERVICE}:6379"}
        found += [_pod(group["groupName"], group, added | _token(cluster, given), given)] * group["replicas"]
    return found


def start_command(params: Mapping[str, str], limits: Mapping[str, str], is_head: bool) -> str:
    """What the operator starts in a Ray container."""
    given = {
        "block": "true", "dashboard-agent-listen-port": "52365", "metrics-export-port": "8080",
        "memory": str(size(limits["memory"])), "num-cpus": limits["cpu"],
    }  # fmt: skip
    if gpus := limits.get("nvidia.com/gpu"):
        given["num-gpus"] = gpus
    added = {"redis-username": "$REDIS_USERNAME", "redis-password": "$REDIS_PASSWORD"}
    given |= added | dict(params) if is_head else {"address": f"{HEAD_SERVICE}:6379", **params}
    words = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(given.items())]
    return " ".join(["ulimit -n 65536; ray start", *(["--head"] if is_head else []), *words])


def size(quantity: str) -> int:
    """The bytes of a quantity such as 4Gi."""
    return int(quantity[:-2]) * UNITS[quantity[-2:]] if quantity[-2:] in UNITS else int(quantity)


def _pod(name: str, group: Mapping[str, Any], added: Mapping[str, str], given: Secrets) -> Pod:
    spec = group["template"]["spec"]
    container = spec["containers"][0]
    environment: dict[str, str] = {}
    for source in container.get("envFrom", []):
        environment |= given[source["secretRef"]["name"]]
    environment |= {one["name"]: one["value"] for one in container["env"]}
    volumes = {one["name"]: one for one in spec["volumes"]}
    places = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    shm = places.pop("/dev/shm")["emptyDir"]
    assert shm["medium"] == "Memory"
    command = start_command(group["rayStartParams"], container["resources"]["limits"], name == "head")
    probes = {kind: container[f"{kind}Probe"] for kind in ("readiness", "liveness")}
    environment |= added
    user = container["securityContext"]["runAsUser"]
    return Pod(name, command, environment, str(size(shm["sizeLimit"])), [*places], user, probes)


def _environment_of_head(cluster: Mapping[str, Any], given: Secrets) -> dict[str, str]:
    options = cluster["gcsFaultToleranceOptions"]
    return {
        "RAY_IP": "127.0.0.1",
        "RAY_ADDRESS": "127.0.0.1:6379",
        "RAY_REDIS_ADDRESS": options["redisAddress"],
        "REDIS_USERNAME": _value(options["redisUsername"], given),
        "REDIS_PASSWORD": _value(options["redisPassword"], given),
        "RAY_external_storage_namespace": "5f1c0a5e-uid-of-the-cluster",
    } | _token(cluster, given)


def _token(cluster: Mapping[str, Any], given: Secrets) -> dict[str, str]:
    assert cluster["authOptions"]["mode"] == "token"
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": given["tandem"]["auth_token"]}


def _value(one: Mapping[str, Any], given: Secrets) -> str:
    reference = one["valueFrom"]["secretKeyRef"]
    return given[reference["name"]][reference["key"]]
