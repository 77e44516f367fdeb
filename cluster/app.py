"""The Serve application `tandem`: gateway -> groups (-> private Redis), for `tandem serve` and for `serve run`.

build_app() is what the launcher calls; build() is what a Serve config names as import_path, with `args` in the shape of
Ray Serve LLM (configs/load.py) and one key more, `single_node`.
"""

import logging
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster import machine
from cluster.gateway.draining import LEAVING_S
from cluster.gateway_replica import Gateway
from cluster.models_source import resolve_settings
from cluster.placement import CPU_SHARE, group_options, max_groups
from cluster.preflight import with_device
from cluster.redis_replica import PrivateRedis
from cluster.replica import Coordinator
from cluster.service import (
    COORDINATOR,
    GATEWAY,
    MAX_ONGOING_REQUESTS,
    REDIS,
    ServiceFacts,
    groups_per_node,
    new_facts,
)
from configs.errors import SettingsError
from configs.load import settings_from_serve_args
from configs.schema import Device, ServiceSettings

log = logging.getLogger("ray.serve.tandem")

ROUTER = RequestRouterConfig(
    request_router_class="cluster.routing.serve_router.GroupRouter",
    request_routing_stats_period_s=2.0,
    initial_backoff_s=0.02,
    max_backoff_s=0.5,
)
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


def build(args: dict[str, Any]) -> Application:
    """For `import_path: cluster.app:build`. Settings errors are raised as they are: Serve prints them.

    What depends on nodes that are not there yet is the user's to say: `device` in engine_kwargs, `single_node` in args.
    """
    settings = resolve_settings(settings_from_serve_args(args))
    device = choose_device(settings.engine.device.device, _cluster_gpus())
    settings = with_device(settings, device)
    home_node = choose_home(args.get("single_node"), device, _alive_nodes())
    facts = new_facts(
        single_node=home_node is not None,
        redis_url=settings.redis.url,
        device=device,
        groups_on_node=groups_per_node(max_groups(settings), cpu_nodes()),
        home_node=home_node,
    )
    return build_app(settings, facts)


def choose_device(asked: Device | None, node_gpus: list[float]) -> Device:
    """As asked, also when the nodes that have it are yet to join; else cuda when a node has a GPU now."""
    if asked is not None:
        log.info("device %s, as asked", asked)
        return asked
    if node_gpus:
        log.info("device cuda: %d node(s) have GPUs", len(node_gpus))
        return "cuda"
    log.warning(
        "device cpu: no node has a GPU now, and GPUs that join later are left alone; "
        "`device: cuda` in engine_kwargs waits for them, `device: cpu` says that this is meant"
    )
    return "cpu"


def choose_home(asked: bool | None, device: Device, nodes: list[dict[str, Any]]) -> str | None:
    """The node whose loopback the service talks over, None when it must be reachable from other nodes.

    `asked` is args' single_node. Not given: one node is taken for all there will be, unless its GPUs are missing; a
    process that Ray then puts elsewhere refuses to start (service.check_install).
    """
    if asked and len(nodes) != 1:
        raise SettingsError(f"the cluster has {len(nodes)} nodes", "single_node")
    if asked is False or len(nodes) != 1:
        log.info("%d node(s): talking over the nodes' own addresses", len(nodes))
        return None
    (node,) = nodes
    if not asked and device == "cuda" and not node["Resources"].get("GPU"):
        log.info("no GPU here yet: talking over the nodes' own addresses, groups will be on others")
        return None
    log.info("one node: talking over loopback; `single_node: false` in args is for a cluster that will have more")
    return str(node["NodeID"])


def build_app(settings: ServiceSettings, facts: ServiceFacts) -> Application:
    """The application for settings whose model is a folder. Needs a connection to Ray."""
    redis = _private_redis(facts) if facts.redis_url is None else None
    options = group_options(settings, facts.device, _cluster_gpus(), MAX_ONGOING_REQUESTS)
    coordinator = serve.deployment(name=COORDINATOR, request_router_config=ROUTER, logging_config=QUIET, **options)(
        Coordinator
    )
    groups = coordinator.bind(settings.engine, facts, public_name(settings), redis)
    gateway = serve.deployment(
        name=GATEWAY,
        num_replicas=settings.gateway.num_gateways,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options=_gateway_resources(facts),
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s + LEAVING_S,
        max_constructor_retry_count=3,
        logging_config=QUIET,
    )(Gateway)
    return gateway.bind(settings, facts, groups, redis)


def public_name(settings: ServiceSettings) -> str:
    """The name that clients and metrics use for the model."""
    names = settings.engine.model.served_model_name
    return names[0] if names else settings.engine.model.model


def _gateway_resources(facts: ServiceFacts) -> dict[str, Any]:
    """A small share of a CPU, on the node whose port was promised if there is one."""
    pinned = {} if facts.gateway_node is None else {"resources": {f"node:{facts.gateway_node}": 0.001}}
    return {"num_cpus": CPU_SHARE} | pinned


def _private_redis(facts: ServiceFacts) -> Application:
    deployment = serve.deployment(
        name=REDIS,
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
        max_ongoing_requests=1000,
        health_check_period_s=2.0,
    )(PrivateRedis)
    return deployment.bind(facts)


def cpu_nodes() -> int:
    """Nodes that groups may be placed on: a head without CPUs is not one."""
    return sum(float(node["Resources"].get("CPU", 0)) > 0 for node in _alive_nodes())


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _cluster_gpus() -> list[float]:
    """GPUs of each node; without a Ray connection, of this machine."""
    if not ray.is_initialized():
        return [float(count)] if (count := machine.cuda_device_count()) else []
    return [gpus for node in _alive_nodes() if (gpus := float(node["Resources"].get("GPU", 0))) > 0]
