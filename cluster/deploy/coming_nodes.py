"""Nodes that Ray's autoscaler may still bring: room for a new version, beside what nodes have left.

Ray's monitor, a process on the head, is started with the file of node types (`ray up`; `ray start
--autoscaling-config`) and says from time to time which nodes of each type there are. Without it no node comes. An
autoscaler outside of Ray, such as KubeRay's, says neither: its nodes count once they are there.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any

import yaml

from tandem.cluster.ray_private.ray_facts import labels_match, on_head, reported_by_monitor

log = logging.getLogger("ray.serve.tandem")
ASK_S = 20.0


def coming_resources(labels: Mapping[str, str]) -> list[dict[str, float]]:
    """The resources of each node that may still come and that a selector of labels takes; an empty one takes all.
    Blocks, at most ASK_S. Needs a connection to Ray."""
    try:
        if (told := reported_by_monitor()) is None:
            return []
        report = json.loads(told)
        config = on_head(_read_config, int(report["monitor_pid"]), ASK_S)
        return [] if config is None else nodes_to_come(config, report.get("autoscaler_report") or {}, labels)
    except Exception as error:  # of many kinds: then only nodes that are there count
        log.info("nodes that an autoscaler may bring are not known: %s", str(error).partition("\n")[0])
        return []


def nodes_to_come(
    config: Mapping[str, Any], report: Mapping[str, Any], labels: Mapping[str, str]
) -> list[dict[str, float]]:
    """The resources of the nodes that may still come, the largest first. config: of the autoscaler, as a
    cluster's launch file has it. report: nodes that are there or on their way, by type."""
    types: Mapping[str, Any] = config.get("available_node_types") or {}
    counts = {name: int(count) for name, count in (report.get("active_nodes") or {}).items()}
    for _, name, *_ in report.get("pending_nodes") or ():
        counts[name] = counts.get(name, 0) + 1
    for name, count in (report.get("pending_launches") or {}).items():
        counts[name] = counts.get(name, 0) + int(count)
    head = config.get("head_node_type")
    most = int(config.get("max_workers", 2))  # Ray's default
    left = most - sum(count for name, count in counts.items() if name != head)
    coming: list[dict[str, float]] = []
    for name, kind in types.items():
        if name == head or not labels_match(kind.get("labels") or {}, labels):
            continue
        room = min(int(kind.get("max_workers", most)) - counts.get(name, 0), left)
        resources = {str(key): float(value) for key, value in (kind.get("resources") or {}).items()}
        coming += [dict(resources) for _ in range(room)]
    coming.sort(key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0)), reverse=True)
    return coming[: max(0, left)]


def _read_config(monitor_pid: int) -> dict[str, Any] | None:
    """Runs on the head: the file that the monitor was started with; None: it was started without one."""
    import os

    import psutil

    for word in psutil.Process(monitor_pid).cmdline():
        if word.startswith("--autoscaling-config="):
            with open(os.path.expanduser(word.partition("=")[2])) as file:
                loaded: dict[str, Any] = yaml.safe_load(file)
                return loaded
    return None
