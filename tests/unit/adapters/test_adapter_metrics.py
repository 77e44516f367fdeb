"""The adapter families of /metrics, as a Prometheus parser reads them."""

from prometheus_client.parser import text_string_to_metric_families

from cluster.adapters.desk import AdapterDesk
from cluster.adapters.entries import AdapterEntry
from cluster.adapters.metrics import render_adapters
from cluster.adapters.registry import AdapterRegistry
from cluster.coordination.registry import AdapterReport, GroupRecord

A, B, GONE = ("a" * 64, "b" * 64, "c" * 64)


def record(group: str, adapters: AdapterReport | None) -> GroupRecord:
    return GroupRecord(group=group, epoch=1, model="demo", state="serving", host="h", pid=1, adapters=adapters)


def test_only_listed_adapters_are_labels() -> None:
    registry = AdapterRegistry(None, "demo")
    registry.keep(AdapterEntry(name="pirate", digest=A, source="/a", pinned=True))
    registry.keep(AdapterEntry(name="twin", digest=A, source="/t"))
    registry.keep(AdapterEntry(name="shout", digest=B, source="/b"))
    desk = AdapterDesk(registry, lambda source: "", ("demo",))
    desk.counts["refused"] += 3
    report = AdapterReport(
        on_device=[A, GONE], on_host=[B], running=["gone", "pirate", "twin"], waiting=["shout"], max_loras=4
    )
    text = render_adapters([record("g1", report), record("g2", None)], "tandem", desk, lambda: 1234.5)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    held = [sample.labels for sample in families["tandem:adapter_residency"].samples]
    engine = {"model_name": "demo", "engine": "g1"}
    assert held == [
        {**engine, "adapter": "pirate", "tier": "device", "pinned": "true"},
        {**engine, "adapter": "twin", "tier": "device", "pinned": "false"},
        {**engine, "adapter": "shout", "tier": "host", "pinned": "false"},
    ]
    (info,) = families["tandem:lora_requests_info"].samples
    used = {"running_lora_adapters": "pirate,twin", "waiting_lora_adapters": "shout", "max_lora": "4"}
    assert (info.labels, info.value) == ({**engine, **used}, 1234.5)
    counted = {s.labels["outcome"]: s.value for s in families["tandem:adapter_listings"].samples}
    assert counted == {"listed": 0, "switched": 0, "unchanged": 0, "refused": 3, "unlisted": 0}
    assert families["tandem:adapters_listed"].samples[0].value == 3
    desk.close()
