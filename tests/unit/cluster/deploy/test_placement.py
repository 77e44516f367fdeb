"""Bundles, strategies and deployment options; what a start says when a group cannot be placed."""

import pytest
import ray

from tandem.cluster.deploy.placement import (
    declared_cpus,
    declared_gpus,
    group_bundles,
    group_demand,
    group_options,
    group_strategy,
    max_groups,
    min_groups,
    surge_percent,
)
from tandem.cluster.service import serve_app
from tandem.cluster.wire.service_facts import APP
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings


def test_a_group_is_one_bundle_for_the_coordinator_and_one_for_each_rank() -> None:
    assert group_bundles(2, "cpu") == [{"CPU": 0.1}] * 3
    assert group_bundles(2, "cuda") == [{"CPU": 0.1}, {"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}]


@pytest.mark.parametrize(
    ("ranks", "device", "gpus", "strategy"),
    [(4, "cpu", [], "STRICT_PACK"), (4, "cuda", [2, 8], "STRICT_PACK"), (4, "cuda", [2, 2], "PACK")],
)
def test_a_group_stays_on_one_node_when_one_can_hold_it(
    ranks: int, device: str, gpus: list[float], strategy: str
) -> None:
    assert group_strategy(ranks, device, gpus) == strategy


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
    demand = group_demand(2, "cuda", "STRICT_PACK")
    assert demand == {"CPU": 2.1, "GPU": 2}
    assert surge_percent(4, demand, free) == percent
    assert surge_percent(4, group_demand(2, "cuda", "PACK"), [{"CPU": 90.0, "GPU": 32.0}]) == 0


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
    assert group_options(fixed, "cpu", [], 7)["num_replicas"] == 3
    options = group_options(scaled, "cpu", [], 7)
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
