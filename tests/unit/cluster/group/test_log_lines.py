"""The lines that groups and gateways log every ten seconds while there is work: counts alone, of what exists anyway."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tandem.cluster.gateway.app import gateway_log
from tandem.cluster.gateway.app.gateway_log import GatewayLog
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.group import group_log
from tandem.cluster.group.group_log import GroupLog
from tandem.workers.engine.base.draft_record import DraftStats
from tandem.workers.engine.base.metric_rows import Histogram
from tandem.workers.engine.base.stats import AdapterStats, EngineStats
from tandem.workers.messages.request import Usage


def stats(**given: Any) -> EngineStats:
    none = dict.fromkeys(
        ("allocated_slots", "empty_slots", "waiting_tokens", "in_flight_steps", "num_blocks", "block_size",
         "used_blocks", "cached_blocks", "reserved_blocks", "running", "waiting"), 0
    )  # fmt: skip
    return EngineStats(**{**none, "kv_usage": 0.0, **given})


def adapters(loads: int, evictions: int) -> AdapterStats:
    return AdapterStats(
        resident=1, on_host=1, num_pages=4, free_pages=2, waiting=0, evictions=evictions, refused=0,
        load_s=Histogram((1.0,)), loads=loads, in_use=0,
    )  # fmt: skip


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_a_group_says_what_its_engine_did(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.group")
    now, at_s = [None], [0.0]
    lines = GroupLog("g", lambda: now[0], lambda: at_s[0])

    def after_10_s(new: Any) -> list[str]:
        now[0] = new
        at_s[0] += 10.0
        lines.write()
        return said(caplog)

    assert after_10_s(None) == [] and after_10_s(stats()) == []
    counted = {
        "running": 3, "waiting": 2, "kv_usage": 0.25, "prompt_tokens": 1000, "generation_tokens": 50, "steps": 40,
        "prefix_cache_queries": 1000, "prefix_cache_hits": 500, "adapters": adapters(2, 1),
        "drafts": DraftStats(10, 40, 30, (10, 20)),
        "rejected": {"queue_full": 2, "invalid": 0}, "finished": {"stop": 1, "length": 0},
    }  # fmt: skip
    first = stats(**counted)
    assert after_10_s(first) == [
        "group g: running 3, waiting 2, KV 25.0%, prompt 100.0 tokens/s, generation 5.0 tokens/s, steps 40, "
        "prefix hits 50.0%, drafts accepted 75.0%, ended stop=1, refused queue_full=2, adapters loads=2 evictions=1"
    ]
    (still,) = after_10_s(first)
    assert still == "group g: running 3, waiting 2, KV 25.0%, prompt 0.0 tokens/s, generation 0.0 tokens/s, steps 0"
    later = stats(**{**counted, "running": 0, "waiting": 0, "steps": 41, "generation_tokens": 60, "preemptions": 4})
    later.drafts = DraftStats(12, 50, 31, (11, 20))
    later.finished = {"stop": 4, "length": 0}
    (over,) = after_10_s(later)
    assert over.endswith("generation 1.0 tokens/s, steps 1, drafts accepted 10.0%, preempted 4, ended stop=3")
    assert after_10_s(later) == []


def test_a_gateway_says_what_it_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tandem.gateway")
    metrics = GatewayMetrics(CollectorRegistry(), "vllm", "m", known=lambda: ["acme"])
    in_flight = [0]
    lines = GatewayLog((metrics.registry, metrics.tenants), "vllm", lambda: in_flight[0])
    lines.write()
    assert said(caplog) == []
    metrics.http_answered("/v1/completions", 200)
    metrics.http_answered("/v1/models", 200)
    metrics.http_answered("/v1/completions", 429)
    for outcome in ("stop", "rejected"):
        metrics.generation_began()
        metrics.generation_ended(outcome, 0.1)
    metrics.tenant_rejected("acme", "rate_limit")
    metrics.tenant_billed("acme", Usage(1, 1))
    metrics.moved()
    lines.write()
    assert said(caplog) == [
        "answers 200=2 429=1, requests rejected=1 stop=1, refused rate_limit=1, moved to another group 1, in flight 0"
    ]
    lines.write()
    assert said(caplog) == []
    in_flight[0] = 2
    lines.write()
    assert said(caplog) == ["in flight 2"]


@pytest.mark.parametrize(
    ("module", "make"),
    [
        (group_log, lambda: GroupLog("g", lambda: stats(running=1))),
        (gateway_log, lambda: GatewayLog((), "x", lambda: 1)),
    ],
    ids=["group", "gateway"],
)
async def test_they_write_again_and_again(
    module: Any, make: Callable[[], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "PERIOD_S", 0.0)
    task = asyncio.create_task(make().run())
    async with asyncio.timeout(30):
        while len([r for r in caplog.records if r.name.startswith("tandem.g")]) < 3:
            await asyncio.sleep(0)
    task.cancel()
