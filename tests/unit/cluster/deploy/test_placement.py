"""Bundles, strategies and deployment options; what a start says when a group cannot be placed."""

import pytest
import ray

from tandem.cluster.deploy.placement import (
    declared_cpus,
    declared_gpus,
    group_options,
    max_groups,
    min_groups,
    surge_percent,
)
from tandem.cluster.service import serve_app
from tandem.cluster.wire.group_shape import GroupShape, group_shape, most_ranks
from tandem.cluster.wire.service_facts import APP
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.schema import Device, ParallelSettings

SHAPE = group_shape(ParallelSettings(), "cpu")


def shape_of(tp: int, pp: int, device: Device, devices_per_node: int | None = None) -> GroupShape:
    return group_shape(
        ParallelSettings(tensor_parallel_size=tp, pipeline_parallel_size=pp, devices_per_node=devices_per_node), device
    )


def test_a_stage_is_one_bundle_and_the_coordinator_is_with_the_first() -> None:
    """Ray cuts no bundle in two: ranks that sum at each layer stay on one node, whichever nodes there are by then."""
    assert shape_of(2, 1, "cpu").bundles == ({"CPU": 0.3},)
    assert shape_of(4, 2, "cuda").bundles == ({"GPU": 4, "CPU": 4.1}, {"GPU": 4, "CPU": 4})
    assert shape_of(1, 3, "cpu").bundles == ({"CPU": 0.2}, {"CPU": 0.1}, {"CPU": 0.1})


def test_every_bundle_is_on_nodes_with_the_labels_asked_for() -> None:
    settings = build_settings("m", {"pipeline_parallel_size": 2, "label_selector": {"tandem": "engine"}})
    options = group_options(settings, shape_of(1, 2, "cpu"), 10)
    assert options["placement_group_bundle_label_selector"] == [{"tandem": "engine"}], "one is for all, to Serve"
    assert "placement_group_bundle_label_selector" not in group_options(build_settings("m", {}), SHAPE, 10)


def test_a_stage_that_is_larger_than_a_node_is_divided_evenly() -> None:
    shape = shape_of(8, 2, "cuda", devices_per_node=4)
    assert shape.bundles == ({"GPU": 4, "CPU": 4.1}, *[{"GPU": 4, "CPU": 4}] * 3)
    assert shape_of(4, 2, "cuda", devices_per_node=8) == shape_of(4, 2, "cuda")
    with pytest.raises(SettingsError, match="3 devices of a node do not divide the 8 ranks") as refused:
        build_settings("m", {"tensor_parallel_size": 8, "devices_per_node": 3})
    assert refused.value.flag == "--devices-per-node"


@pytest.mark.parametrize(
    ("own", "ranks", "groups", "nodes", "most"),
    [
        (1, 1, 1, 1, 1),
        (1, 1, 4, 1, 4),
        (1, 1, 4, 3, 2),
        (2, 2, 2, 8, 2),
        (2, 2, 3, 0, 6),
        (2, 2, 3, 2, 4),  # a group of one stage is on one node
        (1, 2, 1, 2, 1),  # one of two stages on two
        (1, 2, 2, 2, 2),
        (2, 4, 4, 4, 4),
    ],
)
def test_ranks_of_all_groups_spread_over_the_nodes(own: int, ranks: int, groups: int, nodes: int, most: int) -> None:
    assert most_ranks(own, ranks, groups, SHAPE.of_rank, [{"CPU": 8.0}] * nodes) == most


def test_no_node_has_more_ranks_than_gpus() -> None:
    """Also while there is only one of the nodes that an autoscaler will bring."""
    of_rank = shape_of(4, 1, "cuda").of_rank
    assert most_ranks(4, 4, 16, of_rank, [{"GPU": 8.0, "CPU": 64.0}]) == 8
    assert most_ranks(4, 4, 16, of_rank, []) == 64, "it is not known yet"


def test_neighbours_among_the_ranks_of_a_stage_share_a_node() -> None:
    """Whatever nodes Ray has put the bundles on. Stages stay in their order."""
    shape = shape_of(4, 2, "cpu", devices_per_node=1)
    assert shape.bundle_of_rank(["b", "a", "b", "a", "c", "a", "c", "a"]) == [0, 2, 1, 3, 5, 7, 4, 6]
    assert shape_of(2, 2, "cuda").bundle_of_rank(["b", "a"]) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("free", "percent"),
    [
        ([], 0),
        ([{"CPU": 8.0}], 0),
        ([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0, "GPU": 1.0}], 0),
        ([{"CPU": 8.0, "GPU": 2.0}], 25),
        ([{"CPU": 2.1, "GPU": 8.0}], 25),
        ([{"CPU": 8.0, "GPU": 5.0}, {"CPU": 8.0, "GPU": 2.0}], 75),
        ([{"CPU": 90.0, "GPU": 32.0}], 100),
    ],
)
def test_new_groups_start_beside_old_ones_as_far_as_there_is_room(free: list[dict[str, float]], percent: int) -> None:
    assert surge_percent(4, shape_of(2, 1, "cuda").bundles, free) == percent


def test_stages_may_start_on_several_nodes() -> None:
    one_each = [{"CPU": 8.0, "GPU": 2.0}] * 2
    assert surge_percent(2, shape_of(2, 2, "cuda").bundles, one_each) == 50
    assert surge_percent(2, shape_of(4, 1, "cuda").bundles, one_each) == 0


def test_a_group_has_the_time_of_a_replaced_version_and_ends_by_itself_before() -> None:
    """Serve kills it later than --shutdown-timeout, at which it ends unless its model has gone (last_requests.py)."""
    options = group_options(build_settings("m", {"shutdown_timeout": 20, "gateway_drain_timeout": 300}), SHAPE, 10)
    assert options["graceful_shutdown_timeout_s"] == 305
    longer = build_settings("m", {"shutdown_timeout": 700})
    assert longer.replaced_s == 700 and group_options(longer, SHAPE, 10)["graceful_shutdown_timeout_s"] == 705


def test_declared_cpus_hold_every_bundle_and_a_replacement() -> None:
    settings = build_settings("m", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 3})
    assert declared_cpus(settings, "cpu", 2) >= 0.1 * 5 * 4
    assert declared_cpus(settings, "cuda", 64) == 64
    assert [declared_gpus(device, 4) for device in ("cpu", "cuda")] == [0, 4]


def test_groups_are_fixed_or_follow_the_load() -> None:
    fixed = build_settings("m", {"data_parallel_size": 3})
    scaled = build_settings("m", {}, {"min_replicas": 1, "max_replicas": 5, "initial_replicas": 2})
    assert (min_groups(fixed), max_groups(fixed)) == (3, 3)
    assert (min_groups(scaled), max_groups(scaled)) == (2, 5)
    assert group_options(fixed, SHAPE, 7)["num_replicas"] == 3
    options = group_options(scaled, SHAPE, 7)
    assert "num_replicas" not in options and options["autoscaling_config"]["max_replicas"] == 5
    assert options["max_ongoing_requests"] == 7


def test_an_unplaced_group_is_told_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"id": {"state": "PENDING", "strategy": "STRICT_PACK", "bundles": {0: {"CPU": 0.1}, 1: {"GPU": 1.0}}}}
    monkeypatch.setattr(ray.util, "placement_group_table", lambda: table)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 3.5})
    with pytest.raises(SettingsError) as caught:
        serve_app.raise_unplaced(APP)
    for words in ("GPU 1", "CPU 0.1", "STRICT_PACK", "has CPU 4 GPU 0", "free CPU 3.5"):
        assert words in str(caught.value)
    table["id"]["state"] = "CREATED"
    serve_app.raise_unplaced(APP)
