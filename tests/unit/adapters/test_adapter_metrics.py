"""The adapter families of /metrics, as a Prometheus parser reads them."""

import dataclasses

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from cluster.adapters.desk import AdapterDesk
from cluster.adapters.entries import AdapterEntry
from cluster.adapters.metrics import render_adapters
from cluster.adapters.registry import AdapterRegistry
from cluster.coordination.registry import AdapterReport, GroupRecord
from cluster.metrics import render
from tests.support.fake_engine import FakeEngine
from workers.engine.stats import AdapterStats, HistogramStats, TenantStats

A, B, GONE = ("a" * 64, "b" * 64, "c" * 64)


def record(group: str, adapters: AdapterReport | None) -> GroupRecord:
    return GroupRecord(group=group, epoch=1, model="demo", state="serving", host="h", pid=1, adapters=adapters)


def test_what_a_groups_engine_counts() -> None:
    load_s = HistogramStats(bounds=(0.1, 1.0), counts=(2, 1, 0), total=0.7)
    counts = {"num_pages": 64, "free_pages": 16, "resident": 3, "on_host": 5, "in_use": 1, "waiting": 2, "loads": 3}
    adapters = AdapterStats(**counts, load_s=load_s, evictions=7, refused=1)
    tenants = {"acme": TenantStats(queue_s=1.5, queued_requests=3, waiting=2)}
    stats = dataclasses.replace(FakeEngine(None).stats(), adapters=adapters, tenants=tenants)
    found = msgspec.structs.replace(record("g1", AdapterReport()), stats=msgspec.msgpack.encode(stats))
    desk = AdapterDesk(AdapterRegistry(None, "demo"), lambda source: "", ("demo",))
    families = {f.name: f for f in text_string_to_metric_families(render_adapters([found], "tandem", desk))}
    values = {
        "adapters_on_device": 3, "adapters_on_host": 5, "adapter_pages": 64, "adapter_pages_free": 16,
        "adapter_sequences_waiting": 2, "adapter_swaps": 7, "adapters_refused": 1,
    }  # fmt: skip
    for name, value in values.items():
        assert [sample.value for sample in families[f"tandem:{name}"].samples] == [value], name
    loads = {s.name.rpartition("_")[2]: s.value for s in families["tandem:adapter_load_seconds"].samples}
    assert (loads["count"], loads["sum"]) == (3, 0.7)
    shared = {f.name: f for f in text_string_to_metric_families(render([found], "tandem", redis_away=False))}
    for name, value in {"queue_time_seconds": 1.5, "queued_requests": 3, "num_requests_waiting": 2}.items():
        (sample,) = shared[f"tandem:tenant_{name}"].samples
        assert (sample.labels["tenant"], sample.value) == ("acme", value)
    desk.close()


def test_only_listed_adapters_are_labels() -> None:
    registry = AdapterRegistry(None, "demo")
    registry.keep(AdapterEntry(name="pirate", digest=A, source="/a", pinned=True))
    registry.keep(AdapterEntry(name="twin", digest=A, source="/t"))
    registry.keep(AdapterEntry(name="shout", digest=B, source="/b"))
    desk = AdapterDesk(registry, lambda source: "", ("demo",))
    desk.counts["refused"] += 3
    used = {"running": ["gone", "pirate", "twin"], "waiting": ["shout"]}
    report = AdapterReport(on_device=[A[:16], GONE[:16]], on_host=[B[:16]], max_loras=4, **used)
    text = render_adapters([record("g1", report), record("g2", None)], "tandem", desk, lambda: 1234.5)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    held = [sample.labels for sample in families["tandem:adapter_residency"].samples]
    engine = {"model_name": "demo", "engine": "g1"}
    assert held == [
        {**engine, "adapter": "pirate", "tier": "device", "pinned": "true"},
        {**engine, "adapter": "twin", "tier": "device", "pinned": "false"},
        {**engine, "adapter": "shout", "tier": "host", "pinned": "false"},
    ]
    registry.keep(AdapterEntry(name="pirate", digest=A, source="/a", tenant="acme"))
    public = render_adapters([record("g1", report)], "tandem", desk, with_tenants=False)
    assert "pirate" not in public and 'adapter="twin"' in public, "a tenant's own is not named to everybody"
    (info,) = families["tandem:lora_requests_info"].samples
    names = {"running_lora_adapters": "pirate,twin", "waiting_lora_adapters": "shout", "max_lora": "4"}
    assert (info.labels, info.value) == ({**engine, **names}, 1234.5)
    counted = {s.labels["outcome"]: s.value for s in families["tandem:adapter_listings"].samples}
    assert counted == {"listed": 0, "switched": 0, "unchanged": 0, "refused": 3, "unlisted": 0}
    assert families["tandem:adapters_listed"].samples[0].value == 3
    desk.close()
