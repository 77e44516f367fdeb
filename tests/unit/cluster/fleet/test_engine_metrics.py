"""/metrics as a Prometheus parser reads it."""

import dataclasses

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.fleet.engine_metrics import Families, add_engines, add_groups
from tandem.cluster.fleet.group_events import GroupTally
from tandem.cluster.fleet.group_reports import GroupReport
from tandem.workers.engine.base.stats import ExpertStats, OffloadStats
from tests.support.fake_engine import FakeEngine


def report(group: str, stats: bytes) -> GroupReport:
    return GroupReport(group=group, model='a "model"\\', stats=stats)


def text_of(reports: list[GroupReport], prefix: str = "tandem", *, redis_unavailable: bool = False) -> str:
    families = Families(prefix)
    add_engines(families, reports, redis_unavailable)
    return families.text()


def test_every_group_is_a_sample_and_each_family_appears_once() -> None:
    stats = msgspec.msgpack.encode(FakeEngine(None).stats())
    text = text_of([report("g1", stats), report("g2", stats)])
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert text.count("# TYPE tandem:num_requests_running ") == 1
    running = families["tandem:num_requests_running"].samples
    assert [s.labels for s in running] == [{"model_name": 'a "model"\\', "engine": g} for g in ("g1", "g2")]
    assert families["tandem:kv_cache_usage_perc"].samples[0].value == 0.25
    ttft = families["tandem:time_to_first_token_seconds"]
    assert ttft.type == "histogram"
    buckets = [s for s in ttft.samples if s.name.endswith("_bucket") and s.labels["engine"] == "g1"]
    assert buckets[-1].labels["le"] == "+Inf"
    assert families["tandem:redis_away"].samples[0].value == 0


def test_a_disk_tier_that_was_switched_off_shows() -> None:
    offload = OffloadStats(
        block_bytes=8,
        host_slots=4,
        host_blocks=1,
        blocks=dict.fromkeys(("load", "store", "spill", "fetch"), 2),
        copy_s={},
        failed_blocks=0,
        swapped_out=0,
        recomputed=0,
        loaded_tokens=0,
    )
    reports = []
    for group, reason in (("g1", None), ("g2", "the disk is full")):
        stats = dataclasses.replace(
            FakeEngine(None).stats(), offload=dataclasses.replace(offload, disk_disabled=reason)
        )
        reports.append(report(group, msgspec.msgpack.encode(stats)))
    text = text_of(reports)
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == "tandem:kv_disk_disabled"]
    assert [(s.labels["engine"], s.value) for s in family.samples] == [("g1", 0), ("g2", 1)]


def test_loads_of_experts_are_shown_by_expert_and_by_layer() -> None:
    experts = ExpertStats.of({1: [30, 10, 0, 0], 3: [5, 5, 5, 5], 4: [0, 0, 0, 0]})
    reports = [
        report("g1", msgspec.msgpack.encode(dataclasses.replace(FakeEngine(None).stats(), experts=experts))),
        report("dense", msgspec.msgpack.encode(FakeEngine(None).stats())),
    ]
    families = {f.name: f for f in text_string_to_metric_families(text_of(reports))}
    tokens = [(s.labels["engine"], s.labels["expert"], s.value) for s in families["tandem:expert_tokens"].samples]
    assert tokens == [("g1", "0", 35), ("g1", "1", 15), ("g1", "2", 5), ("g1", "3", 5)]
    layers = [(s.labels["layer"], s.value) for s in families["tandem:expert_imbalance"].samples]
    assert layers == [("1", 3), ("3", 1), ("4", 0)]
    assert "expert" not in text_of(reports[1:])


def test_a_group_that_is_lost_without_a_request_shows() -> None:
    families = Families("tandem")
    add_groups(families, ["serving", "loading", "serving"], GroupTally(starts=3, losses=1))
    found = {s.name: (s.labels, s.value) for f in text_string_to_metric_families(families.text()) for s in f.samples}
    counts = {"group_starts": 3, "group_start_failures": 0, "group_losses": 1}
    assert {name: ({}, count) for name, count in counts.items()} == {
        name: found[f"tandem:{name}_total"] for name in counts
    }
    states = [line for line in families.text().splitlines() if line.startswith("tandem:groups{")]
    assert [[*line.split('"')[1::2], line[-3:]] for line in states] == [
        ["loading", "1.0"], ["serving", "2.0"], ["draining", "0.0"],
    ]  # fmt: skip


def test_a_group_without_readable_statistics_costs_nothing() -> None:
    stats = msgspec.msgpack.encode(FakeEngine(None).stats())
    text = text_of([report("new", b""), report("odd", b"\x01"), report("good", stats)], "vllm", redis_unavailable=True)
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert [s.labels["engine"] for s in families["vllm:num_requests_running"].samples] == ["good"]
    assert families["vllm:redis_away"].samples[0].value == 1


def test_histogram_buckets_are_cumulative() -> None:
    engine = FakeEngine(None)
    stats = engine.stats()
    counts = [1, 2] + [0] * (len(stats.time_to_first_token_s.counts) - 3) + [4]
    first = dataclasses.replace(stats.time_to_first_token_s, counts=counts, total=9.5)
    raw = msgspec.msgpack.encode(dataclasses.replace(stats, time_to_first_token_s=first))
    (family,) = [
        f
        for f in text_string_to_metric_families(text_of([report("g", raw)], "t"))
        if f.name == "t:time_to_first_token_seconds"
    ]
    values = [s.value for s in family.samples if s.name.endswith("_bucket")]
    assert values[:3] == [1, 3, 3] and values[-1] == 7
    totals = {s.name.rpartition("_")[2]: s.value for s in family.samples if not s.labels.get("le")}
    assert totals == {"sum": 9.5, "count": 7}
