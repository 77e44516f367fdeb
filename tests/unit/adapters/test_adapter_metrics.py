"""The adapter families of /metrics, as a Prometheus parser reads them."""

import dataclasses

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_metrics import add_adapters
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.fleet.engine_metrics import Families, add_engines
from tandem.cluster.fleet.group_reports import AdapterReport, GroupReport
from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.base.stats import AdapterStats, TenantStats
from tests.support.fake_engine import FakeEngine

A, B, GONE = ("a" * 64, "b" * 64, "c" * 64)


def report_of(group: str, adapters: AdapterReport | None) -> GroupReport:
    return GroupReport(group=group, model="demo", adapters=adapters)


def parsed(families: Families) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(families.text())}


def read(
    reports: list[GroupReport], adapter_service: AdapterService, now_s: float = 0.0, *, with_tenants: bool = True
) -> dict[str, Metric]:
    families = Families("tandem")
    add_adapters(families, reports, adapter_service, lambda: now_s, with_tenants=with_tenants)
    return parsed(families)


def test_what_a_groups_engine_counts() -> None:
    load_s = Histogram(bounds=(0.1, 1.0), counts=[2, 1, 0], total=0.7)
    counts = {"num_pages": 64, "free_pages": 16, "resident": 3, "on_host": 5, "in_use": 1, "waiting": 2, "loads": 3}
    adapters = AdapterStats(**counts, load_s=load_s, evictions=7, refused=1)
    tenants = {"acme": TenantStats(queue_s=1.5, queued_requests=3, waiting=2)}
    stats = dataclasses.replace(FakeEngine(None).stats(), adapters=adapters, tenants=tenants)
    found = msgspec.structs.replace(report_of("g1", AdapterReport()), stats=msgspec.msgpack.encode(stats))
    adapter_service = AdapterService(AdapterList(None, "demo"), lambda source: "", ("demo",))
    families = read([found], adapter_service)
    values = {
        "adapters_on_device": 3, "adapters_on_host": 5, "adapter_pages": 64, "adapter_pages_free": 16,
        "adapter_sequences_waiting": 2, "adapter_swaps": 7, "adapters_refused": 1,
    }  # fmt: skip
    for name, value in values.items():
        assert [sample.value for sample in families[f"tandem:{name}"].samples] == [value], name
    loads = {s.name.rpartition("_")[2]: s.value for s in families["tandem:adapter_load_seconds"].samples}
    assert (loads["count"], loads["sum"]) == (3, 0.7)
    of_engines = Families("tandem")
    add_engines(of_engines, [found], redis_unavailable=False)
    shared = parsed(of_engines)
    for name, value in {"queue_time_seconds": 1.5, "queued_requests": 3, "num_requests_waiting": 2}.items():
        (sample,) = shared[f"tandem:tenant_{name}"].samples
        assert (sample.labels["tenant"], sample.value) == ("acme", value)
    adapter_service.close()


def test_only_listed_adapters_are_labels() -> None:
    adapters = AdapterList(None, "demo")
    adapters.keep(AdapterEntry(name="pirate", digest=A, source="/a", pinned=True))
    adapters.keep(AdapterEntry(name="twin", digest=A, source="/t"))
    adapters.keep(AdapterEntry(name="shout", digest=B, source="/b"))
    adapter_service = AdapterService(adapters, lambda source: "", ("demo",))
    adapter_service.counts["refused"] += 3
    used = {"running": ["gone", "pirate", "twin"], "waiting": ["shout"]}
    report = AdapterReport(on_device=[A[:16], GONE[:16]], on_host=[B[:16]], max_loras=4, **used)
    families = read([report_of("g1", report), report_of("g2", None)], adapter_service, 1234.5)
    held = [sample.labels for sample in families["tandem:adapter_residency"].samples]
    engine = {"model_name": "demo", "engine": "g1"}
    assert held == [
        {**engine, "adapter": "pirate", "tier": "device", "pinned": "true"},
        {**engine, "adapter": "twin", "tier": "device", "pinned": "false"},
        {**engine, "adapter": "shout", "tier": "host", "pinned": "false"},
    ]
    adapters.keep(AdapterEntry(name="pirate", digest=A, source="/a", tenant="acme"))
    public = read([report_of("g1", report)], adapter_service, with_tenants=False)["tandem:adapter_residency"].samples
    assert {s.labels["adapter"] for s in public} == {"twin", "shout"}, "a tenant's own is not named to everybody"
    (info,) = families["tandem:lora_requests_info"].samples
    names = {"running_lora_adapters": "pirate,twin", "waiting_lora_adapters": "shout", "max_lora": "4"}
    assert (info.labels, info.value) == ({**engine, **names}, 1234.5)
    counted = {s.labels["outcome"]: s.value for s in families["tandem:adapter_listings"].samples}
    assert counted == {"listed": 0, "switched": 0, "unchanged": 0, "refused": 3, "unlisted": 0}
    assert families["tandem:adapters_listed"].samples[0].value == 3
    adapter_service.close()
