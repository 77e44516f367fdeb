"""Nodes that an autoscaler may still bring, by its file and by what Ray's monitor says."""

from typing import Any

import pytest

from tandem.cluster.deploy.coming_nodes import nodes_to_come
from tandem.cluster.deploy.placement import surge_percent

CONFIG: dict[str, Any] = {
    "max_workers": 6,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 4}, "max_workers": 0},
        "cpu": {"resources": {"CPU": 8}, "max_workers": 4, "labels": {"tandem": "gateway"}},
        "gpu": {"resources": {"CPU": 16, "GPU": 4}, "max_workers": 3, "labels": {"tandem": "engine"}},
    },
}
CPU, GPU = {"CPU": 8.0}, {"CPU": 16.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("report", "coming"),
    [
        ({}, [GPU] * 3 + [CPU] * 3),  # six workers in all
        ({"active_nodes": {"head": 1, "cpu": 3, "gpu": 1}}, [GPU] * 2),
        ({"active_nodes": {"head": 1, "cpu": 4, "gpu": 2}}, []),
        ({"active_nodes": {"head": 1}, "pending_nodes": [["ip", "gpu", "waiting"]] * 3}, [CPU] * 3),
        ({"active_nodes": {"head": 1}, "pending_launches": {"cpu": 4}}, [GPU] * 2),
    ],
)
def test_each_type_brings_what_it_has_left(report: dict[str, Any], coming: list[dict[str, float]]) -> None:
    assert nodes_to_come(CONFIG, report, {}) == coming


def test_only_nodes_of_the_labels_count() -> None:
    assert nodes_to_come(CONFIG, {}, {"tandem": "engine"}) == [GPU] * 3
    assert nodes_to_come(CONFIG, {}, {"tandem": "none"}) == []


def test_a_full_cluster_that_may_grow_has_room_for_new_groups() -> None:
    full = [{"CPU": 2.0, "GPU": 0.0}]
    bundles = [{"GPU": 4.0, "CPU": 4.1}]
    assert surge_percent(2, bundles, full) == 0
    assert surge_percent(2, bundles, [*full, *nodes_to_come(CONFIG, {"active_nodes": {"gpu": 2}}, {})]) == 50


def test_a_file_without_types_brings_nothing() -> None:
    assert nodes_to_come({}, {"active_nodes": {"x": 1}}, {}) == []
