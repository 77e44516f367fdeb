"""Placement groups and deployment options that are requested from Ray and Serve. Pure functions of the settings.

A group is one placement group: bundle 0 is the coordinator's, bundle i+1 is rank i's. On CPU every bundle requests 0.1
CPU: ranks set their own thread count, and whole cores would only keep groups from starting.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.cluster.wire.service_facts import CPU_SHARE
from tandem.configs.schema import ServiceSettings


def group_bundles(ranks: int, device: str) -> list[dict[str, float]]:
    """Resource bundles of one group, the coordinator's first."""
    rank: dict[str, float] = {"GPU": 1, "CPU": 1} if device == "cuda" else {"CPU": CPU_SHARE}
    return [{"CPU": CPU_SHARE}, *(dict(rank) for _ in range(ranks))]


def group_strategy(ranks: int, device: str, node_gpus: list[float]) -> str:
    """The placement strategy: STRICT_PACK when one node can hold the group, else PACK. node_gpus: of each GPU node."""
    fits = device == "cpu" or any(gpus >= ranks for gpus in node_gpus)
    return "STRICT_PACK" if fits else "PACK"


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


def declared_cpus(settings: ServiceSettings, device: str, cores: int) -> int:
    """The CPU count to start a private Ray with: enough for every bundle; on cuda at least the machine's cores."""
    ranks = settings.engine.parallel.ranks_per_group
    per_group = sum(bundle["CPU"] for bundle in group_bundles(ranks, device))
    others = CPU_SHARE * (settings.gateway.num_gateways + 4)
    # one spare group: a replacement is placed while the group it replaces is still being torn down
    return max(math.ceil(per_group * (max_groups(settings) + 1) + others), cores if device == "cuda" else 1)


def declared_gpus(device: str, devices: int) -> int:
    """The GPU count to start a private Ray with, on a machine that has so many devices: none for ranks on CPU."""
    return devices if device == "cuda" else 0


def surge_percent(replicas: int, demand: Mapping[str, float], free: Sequence[Mapping[str, float]]) -> int:
    """The share of replicas that may run beyond `replicas` while a new version replaces them, in percent.

    demand: of one replica, all on one node. free: what each node has left. With room for none Serve stops old replicas
    before it starts new ones: it would wait for ever for room otherwise.
    """
    if any(demand.values()):
        wanted = {name: amount for name, amount in demand.items() if amount}
        extra = sum(int(min(node.get(name, 0.0) / amount for name, amount in wanted.items()) + 1e-9) for node in free)
    else:
        extra = replicas
    return min(100, 100 * extra // max(1, replicas))


def group_demand(ranks: int, device: str, strategy: str) -> dict[str, float]:
    """The resources that one group needs of a node; more than any has, where it may be spread over several."""
    if strategy != "STRICT_PACK":
        return {"CPU": math.inf}
    bundles = group_bundles(ranks, device)
    return {name: sum(bundle.get(name, 0.0) for bundle in bundles) for name in ("CPU", "GPU")}


def group_options(settings: ServiceSettings, device: str, node_gpus: list[float], max_ongoing: int) -> dict[str, Any]:
    """Serve options of the coordinator deployment. max_ongoing: handle calls in flight per group."""
    ranks = settings.engine.parallel.ranks_per_group
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": CPU_SHARE},
        "placement_group_bundles": group_bundles(ranks, device),
        "placement_group_strategy": group_strategy(ranks, device, node_gpus),
        "max_ongoing_requests": max_ongoing,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": max(settings.shutdown_timeout_s, 0.5),
        "max_constructor_retry_count": 3,
    }
    if settings.autoscaling_config is not None:
        options["autoscaling_config"] = settings.autoscaling_config
    else:
        options["num_replicas"] = settings.engine.parallel.data_parallel_size
    return options
