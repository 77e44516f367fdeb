"""The Serve application `tandem`: gateway -> groups, for `tandem serve` and for `serve run`.

The launcher calls build_app(). A Serve config names build() as its import_path, with `args` in the shape of Ray Serve
LLM (configs/load.py) and two more keys, `single_node` and `allow_unauthenticated_ray`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from msgspec.structs import replace
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from tandem.cluster.deploy.coming_nodes import coming_resources
from tandem.cluster.deploy.nodes import alive_nodes, choose_home, gateways_for, on_cluster
from tandem.cluster.deploy.placement import group_options, least_groups, max_groups, surge_percent
from tandem.cluster.deploy.preflight import check_memory, note_on_redis
from tandem.cluster.deploy.ray_tokens import check_token
from tandem.cluster.deploy.resolved_settings import pin_settings, settings_here
from tandem.cluster.gateway.app.gateway_replica import Gateway
from tandem.cluster.gateway.http.draining import LEAVING_S
from tandem.cluster.group.coordinator import Coordinator
from tandem.cluster.logs.log_files import LogPlace
from tandem.cluster.ray_private.ray_facts import free_resources, proxy_host
from tandem.cluster.wire.group_shape import group_shape
from tandem.cluster.wire.serve_proxy import check_open
from tandem.cluster.wire.service_facts import (
    COORDINATOR,
    GATEWAY,
    GATEWAY_SHARE,
    MAX_ONGOING_REQUESTS,
    ServiceFacts,
)
from tandem.configs.autoscaling import check_policy, goals_of
from tandem.configs.errors import SettingsError
from tandem.configs.load import settings_from_serve_args
from tandem.configs.platform_facts import steps_line
from tandem.configs.schema import RoutingPolicyName, ServiceSettings
from tandem.configs.secrets import with_secrets
from tandem.workers.planning.model_source import model_digest, named_node

log = logging.getLogger("ray.serve.tandem")
FreeResources = Callable[[Mapping[str, str]], Sequence[Mapping[str, float]]]
PRIVATE_REDIS = (
    "no redis_url: the private Redis is a process on the head node, reached over the network without TLS, with its "
    "data in Ray's session folder; `redis_config: {redis_url: ...}` names one that outlives the head"
)
QUIET = {"logging_config": {"enable_access_log": False, "log_level": "WARNING"}}
"""Options of deployments of `tandem serve`. Those of a Serve file have its logging_config (wire/service_facts.py)."""


def build(args: dict[str, Any]) -> Application:
    """Builds the application for `import_path: tandem.cluster.app:build`.

    Two keys of args describe nodes that have not joined yet: `device` in engine_kwargs, and `single_node`. Replicas
    find the service's identity by the application's name, whichever version they are of (wire/identity.py). Raises
    SettingsError, which Serve prints.
    """
    nodes = alive_nodes()
    settings = settings_from_serve_args(args, gateways_for(len(nodes), stays_alone=bool(args.get("single_node"))))
    if not args.get("allow_unauthenticated_ray"):
        gcs_address = ray.get_runtime_context().gcs_address
        check_token("this application", gcs_address, "args", "`allow_unauthenticated_ray: true` in its args")
    with named_node(ray.util.get_node_ip_address()):
        settings = pin_settings(with_secrets(settings))
    check_policy(settings.autoscaling_config)
    check_open(settings.gateway.auth, proxy_host())
    settings = on_cluster(settings, nodes)
    device = settings.engine.device.chosen
    home_node = choose_home(args.get("single_node"), nodes)
    if settings.redis.url is not None and (note := note_on_redis(settings.redis.url)) is not None:
        log.warning("%s", note)
    if home_node is None and settings.redis.url is None:
        log.warning(PRIVATE_REDIS)
    facts = ServiceFacts(
        single_node=home_node is not None,
        redis_url=settings.redis.url,
        device=device,
        ports=settings.engine.parallel.ports,
        max_groups=max_groups(settings),
        home_node=home_node,
        logs=LogPlace(level=settings.logs.level, base=settings.logs.dir, form=settings.logs.format),
    )
    for line in settings.without_effect:
        log.warning("%s", line)
    if (steps := steps_line(settings.engine, device)) is not None:
        log.info("%s", steps)
    return build_app(settings, facts, lambda labels: [*free_resources(labels), *coming_resources(labels)])


def router_config(policy: RoutingPolicyName) -> RequestRouterConfig:
    """Returns what Serve needs to know of our router, with that policy in the gateways."""
    return RequestRouterConfig(
        request_router_class="tandem.cluster.routing.router.serve_router.GroupRouter",
        request_router_kwargs={"policy": policy},
        request_routing_stats_period_s=2.0,
        initial_backoff_s=0.02,
        max_backoff_s=0.5,
    )


def build_app(settings: ServiceSettings, facts: ServiceFacts, free: FreeResources = lambda labels: ()) -> Application:
    """Builds the application for pinned settings, which every process resolves on its own machine. Needs a connection
    to Ray. free: what each node with such labels has left, where this version may replace another: as far as there is
    room, new replicas start first."""
    facts = replace(
        facts,
        model_digest=model_digest(settings.engine.model),
        shutdown_timeout_s=settings.shutdown_timeout_s,
        may_sleep=least_groups(settings) == 0,
        is_scaled=goals_of(settings.autoscaling_config) is not None,
        record_mib=settings.logs.record_mib,
        record=settings.logs.record,
    )
    shape = group_shape(settings.engine.parallel, facts.device)
    options = group_options(settings, shape, MAX_ONGOING_REQUESTS)
    room = free(settings.engine.parallel.label_selector) if _has_memory(settings) else ()
    if (asked := settings.max_surge_percent) is None:
        asked = surge_percent(max_groups(settings), shape.bundles, room)
    options["max_surge_percent"] = asked
    quiet: dict[str, Any] = QUIET if facts.open_port else {}
    router = router_config(settings.gateway.routing_policy)
    coordinator = serve.deployment(name=COORDINATOR, request_router_config=router, **quiet, **options)(Coordinator)
    groups = coordinator.bind(settings.engine, facts, public_name(settings))
    gateway = serve.deployment(
        name=GATEWAY,
        num_replicas=settings.gateway.num_gateways,
        user_config={},  # one that is taken out of the file again is handed over too
        max_surge_percent=100,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options=_gateway_resources(facts, settings.gateway.label_selector),
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.replaced_s + LEAVING_S,
        max_constructor_retry_count=3,
        **quiet,
    )(Gateway)
    return gateway.bind(settings, facts, groups)


def public_name(settings: ServiceSettings) -> str:
    """The name that clients and metrics use for the model."""
    names = settings.engine.model.served_model_name
    return names[0] if names else settings.engine.model.model


def _gateway_resources(facts: ServiceFacts, labels: Mapping[str, str]) -> dict[str, Any]:
    """Actor options of a gateway: a share of a CPU, on the node of the service's port if one is named, or on nodes with
    these labels."""
    pinned = {} if facts.gateway_node is None else {"resources": {f"node:{facts.gateway_node}": 0.001}}
    return {"num_cpus": GATEWAY_SHARE} | pinned | ({"label_selector": dict(labels)} if labels else {})


def _has_memory(settings: ServiceSettings) -> bool:
    """True if the host memory that is free now holds all groups once more, as far as settings tell."""
    try:
        check_memory(settings_here(settings, weights=False))
    except SettingsError:
        return False
    return True
