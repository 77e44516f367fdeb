"""The Serve application `tandem`: gateway -> groups (-> private Redis), for `tandem serve` and for `serve run`.

build_app() is what the launcher calls; build() is what a Serve config names as import_path, with `args` in the shape of
Ray Serve LLM (configs/load.py).
"""

from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from cluster import machine
from cluster.gateway_replica import Gateway
from cluster.models_source import resolve_settings
from cluster.placement import CPU_SHARE, group_options
from cluster.redis_replica import PrivateRedis
from cluster.replica import Coordinator
from cluster.service import COORDINATOR, GATEWAY, MAX_ONGOING_REQUESTS, REDIS, ServiceFacts, new_facts
from configs.load import settings_from_serve_args
from configs.schema import ServiceSettings

ROUTER = RequestRouterConfig(
    request_router_class="cluster.routing.serve_router.GroupRouter",
    request_routing_stats_period_s=2.0,
    initial_backoff_s=0.02,
    max_backoff_s=0.5,
)
QUIET = {"enable_access_log": False, "log_level": "WARNING"}


def build(args: dict[str, Any]) -> Application:
    """For `import_path: cluster.app:build`. Settings errors are raised as they are: Serve prints them."""
    settings = resolve_settings(settings_from_serve_args(args))
    device = settings.engine.device.device or ("cuda" if _cluster_gpus() else "cpu")
    facts = new_facts(single_node=len(_alive_nodes()) == 1, redis_url=settings.redis.url, device=device)
    return build_app(settings, facts)


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
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s + 1.0,
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
        name=REDIS, num_replicas=1, ray_actor_options={"num_cpus": 0}, logging_config=QUIET, max_ongoing_requests=1000
    )(PrivateRedis)
    return deployment.bind(facts)


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _cluster_gpus() -> list[float]:
    """GPUs of each node; without a Ray connection, of this machine."""
    if not ray.is_initialized():
        return [float(count)] if (count := machine.cuda_device_count()) else []
    return [gpus for node in _alive_nodes() if (gpus := float(node["Resources"].get("GPU", 0))) > 0]
