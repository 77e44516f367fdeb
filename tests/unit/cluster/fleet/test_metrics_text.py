"""/metrics of groups and adapters against a recorded text: families, types, help, labels, buckets and values. It holds
what is there; a new family is a row and its line in docs/, and need not be in it."""

import dataclasses
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_parser
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_metrics import add_adapters
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.fleet.engine_metrics import Families, add_engines
from tandem.cluster.fleet.group_reports import AdapterReport, GroupReport
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics, as_open_metrics
from tandem.workers.engine.base.draft_record import DraftStats
from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.base.stats import AdapterStats, EngineStats, OffloadStats, TenantStats
from tests.support.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[4]
RECORDED = Path(__file__).parent / "metrics.txt"
A, B = "a" * 64, "b" * 64
NOW_S = 1764000000.25


def stats(step: int) -> EngineStats:
    """Every number differs; some are large, some are fractions."""
    empty = FakeEngine(None).stats()
    values: dict[str, object] = {}
    for name in (f.name for f in dataclasses.fields(empty)):
        value, index = getattr(empty, name), zlib.crc32(name.encode()) % 97
        if isinstance(value, Histogram):
            counts = [step * (i % 4) for i in range(len(value.counts))]
            values[name] = dataclasses.replace(value, counts=counts, total=12345678.5 * step)
        elif isinstance(value, int | float):
            values[name] = (index + 1) * step * (12345678 if index % 3 else 0.125 if isinstance(value, float) else 1)
    values["finished"] = {reason: step * (i + 1) for i, reason in enumerate(empty.finished)}
    values["rejected"] = {"queue_full": step, "queue_timeout": 2 * step}
    return dataclasses.replace(empty, **values)


def offload() -> OffloadStats:
    kinds = ("load", "store", "spill", "fetch")
    return OffloadStats(
        block_bytes=1 << 20,
        host_slots=400,
        host_blocks=123,
        blocks={kind: 1000 * (i + 1) for i, kind in enumerate(kinds)},
        copy_s={kind: 0.001 * (i + 1) for i, kind in enumerate(kinds)},
        failed_blocks=3,
        swapped_out=5,
        recomputed=7,
        loaded_tokens=16001,
        disk_disabled="the disk is full",
        open_tickets=2,
    )


def adapters() -> AdapterStats:
    load_s = Histogram(bounds=(0.001, 0.5, 1.0, 300.0), counts=[2, 1, 0, 4, 1], total=0.7)
    counts = {"num_pages": 64, "free_pages": 16, "resident": 3, "on_host": 5, "in_use": 1, "waiting": 2, "loads": 8}
    return AdapterStats(**counts, load_s=load_s, evictions=7, refused=1)


def reports() -> list[GroupReport]:
    tenants = {"acme": TenantStats(queue_s=1.5, queued_requests=3, waiting=2), "other": TenantStats(waiting=1)}
    drafts = [DraftStats(1000, 4100, 2300, (900, 800, 400, 200)), DraftStats(7, 19, 5, (3, 2))]
    rich = dataclasses.replace(stats(3), offload=offload(), adapters=adapters(), tenants=tenants, drafts=drafts[0])
    plain = dataclasses.replace(stats(1), drafts=drafts[1])
    used = {"running": ["gone", "pirate", "twin"], "waiting": ["shout"]}
    report = AdapterReport(on_device=[A[:16], "c" * 16], on_host=[B[:16]], max_loras=4, **used)
    shape = GroupReport(group="g1", model='a "model"\\\nline')
    return [
        msgspec.structs.replace(shape, stats=msgspec.msgpack.encode(rich), adapters=report),
        msgspec.structs.replace(shape, group="g2", model="demo", stats=msgspec.msgpack.encode(plain)),
        msgspec.structs.replace(shape, group="new", adapters=AdapterReport()),
        msgspec.structs.replace(shape, group="odd", stats=b"\x01"),
    ]


def served(found: list[GroupReport], prefix: str = "tandem", *, with_tenants: bool = True) -> str:
    adapters = AdapterList(None, "demo")
    adapters.keep(AdapterEntry(name="pirate", digest=A, source="/a", pinned=True))
    adapters.keep(AdapterEntry(name="twin", digest=A, source="/t", tenant="acme"))
    adapters.keep(AdapterEntry(name="shout", digest=B, source="/b"))
    adapter_service = AdapterService(adapters, lambda source: "", ("demo",))
    adapter_service.counts["refused"] += 3
    families = Families(prefix)
    add_engines(families, found, redis_unavailable=True, with_tenants=with_tenants)
    add_adapters(families, found, adapter_service, lambda: NOW_S, with_tenants=with_tenants)
    adapter_service.close()
    return families.text()


def parsed(text: str) -> dict[str, tuple[str, str, list[tuple[object, ...]]]]:
    """Type, help and sorted samples by family."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families), "each family stands once"
    return {
        f.name: (f.type, f.documentation, sorted((s.name, sorted(s.labels.items()), s.value) for s in f.samples))
        for f in families
    }


@pytest.mark.parametrize("prefix", ["tandem", "vllm"])
def test_it_equals_the_recorded_text(prefix: str) -> None:
    text, recorded = served(reports(), prefix), RECORDED.read_text().replace(" tandem:", f" {prefix}:")
    recorded = re.sub(r"^tandem:", f"{prefix}:", recorded, flags=re.M)
    held = parsed(recorded)
    assert {name: family for name, family in parsed(text).items() if name in held} == held
    # the parser gives every counter a _total, so the names that are served are compared too
    for pattern in (r"^# .*$", r"^[^#\s{]+(?=[{ ])"):
        assert set(re.findall(pattern, text, re.M)) >= set(re.findall(pattern, recorded, re.M))
    assert "_created" not in text


def test_without_tenants_the_other_families_are_the_same() -> None:
    everything, public = parsed(served(reports())), parsed(served(reports(), with_tenants=False))
    hidden = everything.keys() - public.keys()
    assert hidden == {name for name in everything if name.startswith("tandem:tenant_")}
    named = {"tandem:adapter_residency", "tandem:lora_requests_info"}
    assert all(public[name] == everything[name] for name in public.keys() - named)
    assert not re.search("twin|acme", str(public))


def test_groups_without_tiers_below_the_device_have_no_families_of_them() -> None:
    everything, without = parsed(served(reports())), parsed(served(reports()[1:]))
    missing = everything.keys() - without.keys()
    assert missing == {name for name in everything if re.match("tandem:kv_(offload|host|disk)", name)}


def test_groups_without_speculative_decoding_have_no_families_of_it() -> None:
    """Nor do others get samples for them."""
    one, other, *rest = reports()
    without = msgspec.structs.replace(other, stats=msgspec.msgpack.encode(stats(1)))
    named = r'tandem:spec_decode_\w+\{[^}]*engine="(\w+)"'
    assert set(re.findall(named, served([one, other, *rest]))) == {"g1", "g2"}
    assert set(re.findall(named, served([one, without, *rest]))) == {"g1"}
    assert "spec_decode" not in served([without, *rest])


def test_every_family_has_a_line_in_the_pages() -> None:
    """A metric of which no guide speaks is one that nobody understands: docs/reference has only its help."""
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    served_names = re.findall(r"^# TYPE tandem:(\w+)", served(reports()), re.M)
    assert len(served_names) > 50
    assert not [name for name in served_names if not re.search(rf"`{name}\W", pages)]


def samples(families: Iterable[Family]) -> list[tuple[object, ...]]:
    return sorted((s.name, sorted(s.labels.items()), s.value) for f in families for s in f.samples)


@pytest.mark.parametrize("prefix", ["tandem", "vllm"])
def test_open_metrics_have_the_same_samples_and_are_read_by_a_strict_parser(prefix: str) -> None:
    metrics = GatewayMetrics(CollectorRegistry(), prefix, "m")
    metrics.http_answered("/v1/models", 200)
    text = served(reports(), prefix) + generate_latest(metrics.registry).decode()
    rendered = as_open_metrics(text.encode()).decode()
    wanted = [
        (re.sub(r"(kv_offload_\w+_bytes)_total", r"\1", name), *rest)
        for name, *rest in samples(text_string_to_metric_families(text))
    ]
    assert samples(open_parser(rendered)) == sorted(wanted)
    assert rendered.endswith("# EOF\n") and f"{prefix}:kv_offload_load_bytes{{" in rendered
