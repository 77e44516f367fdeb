"""Series that name tenants: they stay as long as the tenant is known; one that was removed loses them."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tandem.cluster.gateway.http.gateway_metrics import FORGET_PERIOD_S, TENANT_IDLE_S, GatewayMetrics
from tandem.workers.messages.request import Usage

USAGE = Usage(prompt_tokens=5, completion_tokens=2)


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.known: set[str] = set()
        self.metrics = GatewayMetrics(CollectorRegistry(), "tandem", "demo", lambda: self.now_s, lambda: self.known)

    def series(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Values by tenant, then by family and other labels."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(generate_latest(self.metrics.tenants).decode()):
            for sample in (s for s in family.samples if s.name.endswith("_total")):
                labels = dict(sample.labels)
                found.setdefault(labels.pop("tenant"), {})[sample.name, *labels.values()] = sample.value
        return found


def test_a_known_tenant_with_a_rare_request_keeps_its_counts() -> None:
    rig = Rig()
    rig.known = {"rare"}
    counts = []
    for _ in range(3):
        for tenant in ("rare", "default"):
            rig.metrics.tenant_billed(tenant, USAGE)
        counts.append([rig.series()[tenant]["tandem:tenant_requests_total",] for tenant in ("rare", "default")])
        rig.now_s += 2 * TENANT_IDLE_S
    assert counts == [[1, 1], [2, 2], [3, 3]]
    rig.known = set()
    rig.metrics.tenant_billed("default", USAGE)
    assert set(rig.series()) == {"default"}, "a removed one goes"


def test_a_known_tenant_before_removed_ones_does_not_keep_them() -> None:
    rig = Rig()
    rig.known = {"first", "last"}
    for tenant in ("first", "removed", "last"):
        rig.metrics.tenant_rejected(tenant, "rate")
    rig.now_s = TENANT_IDLE_S + FORGET_PERIOD_S
    rig.metrics.tenant_rejected("last", "rate")
    assert set(rig.series()) == {"first", "last"}


def test_an_idle_removed_tenant_loses_every_series_and_begins_again() -> None:
    rig = Rig()
    for tenant in ("idle", "busy"):
        rig.metrics.tenant_billed(tenant, USAGE)
        rig.metrics.tenant_rejected(tenant, "rate")
        rig.metrics.text_worked(tenant, 0.5, waited_s=0.1)
    before = rig.series()
    assert before["idle"] == before["busy"] and len(before["idle"]) == 6
    rig.now_s = TENANT_IDLE_S - 1.0
    rig.metrics.tenant_billed("busy", USAGE)
    assert set(rig.series()) == {"idle", "busy"}
    rig.now_s += 1.0 + FORGET_PERIOD_S
    rig.metrics.tenant_billed("busy", USAGE)
    assert set(rig.series()) == {"busy"}
    assert rig.series()["busy"]["tandem:tenant_requests_total",] == 3
    rig.metrics.tenant_billed("idle", USAGE)
    assert rig.series()["idle"] == {
        ("tandem:tenant_requests_total",): 1.0,
        ("tandem:tenant_tokens_total", "prompt"): 5.0,
        ("tandem:tenant_tokens_total", "cached"): 0.0,
        ("tandem:tenant_tokens_total", "completion"): 2.0,
    }


def test_ten_thousand_tenants_come_and_go_and_few_are_kept() -> None:
    rig = Rig()
    for number in range(10_000):
        rig.metrics.tenant_rejected(f"t{number}", "rate")
        rig.now_s += 10.0
    most = (TENANT_IDLE_S + FORGET_PERIOD_S) / 10.0 + 2
    counters = rig.metrics._by_tenant
    assert len(counters._used_s) == len(counters._series) <= most
    assert TENANT_IDLE_S / 10.0 <= len(rig.series()) <= most
