"""GroupShape: the bundles of resources that Ray places a group in, and the bundle of each rank. A pure function of the
settings, never of the nodes that live when a service is built: others join, and groups are placed anew.

A stage of a pipeline is one bundle, which Ray never divides over nodes, as its ranks sum at each layer; stages are
placed near each other (PACK), and may be apart. A stage that is larger than a node (--devices-per-node) is divided into
equal bundles. The coordinator is in the first bundle, beside rank 0.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.cluster.wire.service_facts import CPU_SHARE
from tandem.configs.platform_facts import PLATFORM_FACTS
from tandem.configs.schema import Device, ParallelSettings

Resources = Mapping[str, float]


@dataclass(frozen=True)
class GroupShape:
    """bundles: of resources, the first one's with the coordinator's. stages: the bundles of each stage, by index.
    ranks_of_bundle: how many each holds. of_rank: the resources of a rank."""

    bundles: tuple[dict[str, float], ...]
    stages: tuple[range, ...]
    ranks_of_bundle: int
    of_rank: Resources

    def bundle_of_rank(self, nodes: Sequence[str]) -> list[int]:
        """Returns the bundle of each rank. nodes: that Ray has placed the bundles on, by bundle. The bundles of a stage
        are dealt node by node, so that neighbours among its ranks share a node where they can, those of the
        coordinator's node first."""

        def place(bundle: int) -> tuple[bool, str, int]:
            return nodes[bundle] != nodes[0], nodes[bundle], bundle

        order = [bundle for stage in self.stages for bundle in sorted(stage, key=place)]
        return [bundle for bundle in order for _ in range(self.ranks_of_bundle)]


def group_shape(parallel: ParallelSettings, device: Device) -> GroupShape:
    """Returns the shape of the groups of a service, for checked settings."""
    per_stage, per_bundle = _divided(parallel)
    of_rank = PLATFORM_FACTS[device].ray_resources
    bundle = {name: _sum(amount * per_bundle) for name, amount in of_rank.items()}
    bundles = [dict(bundle) for _ in range(per_stage * parallel.pipeline_parallel_size)]
    bundles[0]["CPU"] = _sum(bundle["CPU"] + CPU_SHARE)
    stages = tuple(range(first, first + per_stage) for first in range(0, len(bundles), per_stage))
    return GroupShape(tuple(bundles), stages, per_bundle, of_rank)


def most_ranks(own: int, ranks: int, groups: int, of_rank: Resources, nodes: Sequence[Resources]) -> int:
    """Returns the most ranks that may share a node, at least `own`, by which they divide its memory. own: those of one
    group there, which are `ranks` in all. groups: the most that may run. nodes: all resources of each that groups may
    be placed on now. Ray places a group where the largest share is free, so they spread evenly over equal nodes; no
    node has more ranks than devices."""
    spread = own * math.ceil(groups * ranks / (max(1, len(nodes)) * own))
    devices = max((int(node.get("GPU", 0.0)) for node in nodes), default=0) if "GPU" in of_rank else 0
    return max(own, min(spread, devices) if devices else spread)


def rooms(bundles: Sequence[Resources], free: Sequence[Resources], most: int) -> int:
    """Returns for how many groups there is room beside what runs, at most `most`. free: what each node has left. Each
    bundle is put where it fits first, the largest first, so there may be more room than that, never less."""
    left = [dict(node) for node in free]
    order = sorted(bundles, key=lambda one: (one.get("GPU", 0.0), one.get("CPU", 0.0)), reverse=True)
    for count in range(most):
        if not all(_put(bundle, left) for bundle in order):
            return count
    return most


def _divided(parallel: ParallelSettings) -> tuple[int, int]:
    """Returns how many bundles a stage has, and how many ranks each holds."""
    ranks, devices = parallel.tensor_parallel_size, parallel.devices_per_node
    if devices is None or ranks <= devices:
        return 1, ranks
    assert ranks % devices == 0, "checked with the settings"
    return ranks // devices, devices


def _put(bundle: Resources, nodes: Sequence[dict[str, float]]) -> bool:
    """Takes a bundle's resources from the first node that has them; False if there is none."""
    for node in nodes:
        if all(node.get(name, 0.0) + 1e-6 >= amount for name, amount in bundle.items()):
            node.update({name: node[name] - amount for name, amount in bundle.items() if amount})
            return True
    return False


def _sum(amount: float) -> float:
    return round(amount, 4)  # the finest that Ray tells apart
