"""Deployment options that are requested from Serve. Pure functions of the settings; a group is one placement group of
the bundles of its shape (wire/group_shape.py)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.cluster.wire.group_shape import GroupShape, group_shape, rooms
from tandem.cluster.wire.service_facts import CPU_SHARE
from tandem.configs.schema import Device, ServiceSettings

LAST_WORDS_S = 5.0
"""Time for a group that ends by itself, until Serve kills it."""


def max_groups(settings: ServiceSettings) -> int:
    """The most groups that may run at once, with autoscaling or without."""
    if settings.autoscaling_config is not None:
        return int(settings.autoscaling_config.get("max_replicas", 1))
    return settings.engine.parallel.data_parallel_size


def min_groups(settings: ServiceSettings) -> int:
    """The number of groups that a start waits for."""
    config = settings.autoscaling_config
    if config is None:
        return settings.engine.parallel.data_parallel_size
    return int(config.get("initial_replicas", config.get("min_replicas", 1)))


def least_groups(settings: ServiceSettings) -> int:
    """The fewest groups that run when nothing is asked of them."""
    config = settings.autoscaling_config
    return settings.engine.parallel.data_parallel_size if config is None else int(config.get("min_replicas", 1))


def declared_cpus(settings: ServiceSettings, device: Device, cores: int) -> int:
    """The CPU count to start a private Ray with: enough for every bundle; on cuda at least the machine's cores."""
    per_group = sum(bundle["CPU"] for bundle in group_shape(settings.engine.parallel, device).bundles)
    others = CPU_SHARE * (settings.gateway.num_gateways + 4)
    # one spare group: a replacement is placed while the group it replaces is still being torn down
    return max(math.ceil(per_group * (max_groups(settings) + 1) + others), cores if device == "cuda" else 1)


def declared_gpus(device: Device, devices: int) -> int:
    """The GPU count to start a private Ray with, on a machine that has so many devices: none for ranks on CPU."""
    return devices if device == "cuda" else 0


def surge_percent(replicas: int, bundles: Sequence[Mapping[str, float]], free: Sequence[Mapping[str, float]]) -> int:
    """The share of replicas that may run beyond `replicas` while a new version replaces them, in percent.

    bundles: of one replica. free: what each node has left. With room for none Serve stops old replicas before it starts
    new ones: it would wait for ever for room otherwise.
    """
    return 100 * rooms(bundles, free, replicas) // max(1, replicas)


def group_options(settings: ServiceSettings, shape: GroupShape, max_ongoing: int) -> dict[str, Any]:
    """Serve options of the coordinator deployment. max_ongoing: handle calls in flight per group."""
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": CPU_SHARE},
        "placement_group_bundles": [dict(bundle) for bundle in shape.bundles],
        "placement_group_strategy": "PACK",
        "max_ongoing_requests": max_ongoing,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        # it ends by itself at --shutdown-timeout, unless what it computes can end nowhere else (group/last_requests.py)
        "graceful_shutdown_timeout_s": settings.replaced_s + LAST_WORDS_S,
        "max_constructor_retry_count": 3,
    }
    if labels := settings.engine.parallel.label_selector:
        options["placement_group_bundle_label_selector"] = [labels]  # for each bundle
    if settings.autoscaling_config is not None:
        options["autoscaling_config"] = settings.autoscaling_config
    else:
        options["num_replicas"] = settings.engine.parallel.data_parallel_size
    return options
