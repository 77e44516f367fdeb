"""The files for containers: what they start and with which environment, against the other launch files."""

from typing import Any

import yaml

from tandem.configs.bundled import SWITCHES, read_switches
from tandem.configs.load import settings_from_serve_args
from tests.launch import compose_file, rayservice
from tests.support.service import REPOSITORY
from tests.unit.cluster.deploy.test_cluster_files import check_for_a_cluster

CONFIGS = REPOSITORY / "configs"
SECRETS = {
    "tandem-head": {"RAY_REDIS_USERNAME": "ray", "RAY_REDIS_PASSWORD": "a b"},
    "tandem-service": {"TANDEM_API_KEY": "k", "TANDEM_REDIS_URL": "redis://r"},
}
AGENTS = {"--dashboard-agent-grpc-port=8267", "--runtime-env-agent-port=8268"}


def raw_compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(compose_file.FILE.read_text())
    return loaded


def test_every_ray_container_of_compose_takes_the_switches() -> None:
    services = raw_compose()["services"]
    with_ray = {name: one for name, one in services.items() if name != "redis"}
    assert {*with_ray} == {"head", "worker", "gpu-worker", "deploy"}
    for one in with_ray.values():
        assert (compose_file.FILE.parent / one["env_file"][0]).resolve() == SWITCHES
        assert one["env_file"][1] == "${HOME}/.ray/service.env" and one["secrets"] == ["auth_token"]
        assert one["shm_size"] == "4gb", "Ray's object store is there"
        assert one["ulimits"] == {"nofile": 65536}, "a proxy takes a file for each connection"
    knows_redis = {name for name, one in services.items() if "${HOME}/.ray/head.env" in one.get("env_file", [])}
    assert knows_redis == {"head"}, "only the head is to know Ray's own Redis"
    assert [name for name, one in services.items() if "ports" in one] == ["head"]
    assert services["head"]["ports"] == ["8000:8000"]


def test_nodes_of_compose_start_as_the_others_do() -> None:
    services = raw_compose()["services"]
    for name in ("head", "worker", "gpu-worker"):
        *_, words = services[name]["command"]
        assert {*words.split()} >= {*AGENTS, "--metrics-export-port=8266"}
        assert words.startswith("exec ray start ") and words.endswith(" --block")
    assert '--redis-password="$$RAY_REDIS_PASSWORD"' in services["head"]["command"][-1]
    assert services["head"]["depends_on"] == {"redis": {"condition": "service_healthy"}}
    assert services["deploy"]["command"][-1] == "configs/serve/cpu.yaml"
    assert "${MODELS:-../demo}:/models:ro" in services["worker"]["volumes"], "models are only read"


def test_every_pod_has_the_switches_a_store_and_probes() -> None:
    service = rayservice.read_file()
    head, *workers = rayservice.pods(service, SECRETS)
    assert len(workers) > 1, "gateways are not on the head only"
    for pod in (head, *workers):
        assert {**read_switches(), **SECRETS["tandem-service"]}.items() <= pod.environment.items()
        assert pod.shm == str(4 << 30) and pod.user == 1000
        assert pod.probes["liveness"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
        assert {*pod.command.split()} >= AGENTS
    assert all("REDIS_PASSWORD" not in pod.environment for pod in workers)
    assert head.environment["REDIS_PASSWORD"] == "a b" and "--redis-password=$REDIS_PASSWORD" in head.command
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert {one["name"]: one["value"] for one in container["env"]} == read_switches()
        assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": 8000}


def test_each_cluster_of_kuberay_has_a_prefix_of_its_own() -> None:
    """Two RayClusters live side by side while a RayService is updated."""
    options = rayservice.read_file()["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert "externalStorageNamespace" not in options and options["redisAddress"]


def test_kuberay_serves_what_cpu_yaml_says() -> None:
    text = rayservice.read_file()["spec"]["serveConfigV2"]
    config = yaml.safe_load(text)
    assert config == yaml.safe_load((CONFIGS / "serve" / "cpu.yaml").read_text())
    (application,) = config["applications"]
    check_for_a_cluster(
        config["http_options"]["host"], application["args"], settings_from_serve_args(application["args"])
    )


def test_the_image_takes_any_base_and_is_nobodys_root() -> None:
    lines = (CONFIGS / "docker" / "Dockerfile").read_text().splitlines()
    steps = [line.split(" ", 1) for line in lines if line[:1].isalpha()]
    assert steps[0][1].startswith("BASE=") and steps[1] == ["FROM", "${BASE}"]
    assert [user for word, user in steps if word == "USER"] == ["tandem"]
    copied = {word for kind, words in steps if kind == "COPY" for word in words.split()[1:-1]}
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    mounted = yaml.safe_load((CONFIGS / "cluster" / "local.yaml").read_text())["file_mounts"].values()
    assert copied == {name for name in mounted if not name.startswith("~")}, "an image has what nodes are sent"
