"""benchmarks/service/serve.py: both sides are the same engine, and what it reports stands beside the roofline and
a peer."""

import argparse
import asyncio
import io
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from benchmarks.service.kv_waste import PERIOD_S, EngineWatch, KVWaste, watched
from benchmarks.service.serve import Result, report, service_flags
from benchmarks.workload import Timeline, summarize
from tandem.configs.options import OPTIONS

OPTIONS_GIVEN = argparse.Namespace(dtype="float32", threads=3, repeats=1)


def test_the_service_runs_on_the_cpu_as_offline_does() -> None:
    flags = service_flags(OPTIONS_GIVEN, 512)
    names = {option.name.replace("_", "-") for option in OPTIONS}
    assert {flag.removeprefix("--").removeprefix("no-") for flag in flags if flag.startswith("--")} <= names
    given = dict(zip(flags[:-1:2], flags[1::2], strict=True))
    assert given["--device"] == "cpu" and given["--cpu-threads"] == "3"


def test_the_report_names_the_roofline_and_the_peer() -> None:
    one = summarize([Timeline(0.0, token_times_s=[0.5, 1.0])])
    for peer, expected in (([1.0], True), ([], False)):
        printed = io.StringIO()
        result = Result([one], [one], peer, KVWaste(200, 5), KVWaste(1000, 30))
        report(OPTIONS_GIVEN, Console(file=printed, width=200), result, 2 * one.tokens_per_s)
        assert "KV waste (allocated slots without a token): HTTP 3.00%, offline 2.50%" in printed.getvalue()
        assert "HTTP over offline: 1.000" in printed.getvalue() and "; HTTP reached 0.50 of it" in printed.getvalue()
        assert ("over sequential transformers: 2.00x" in printed.getvalue()) is expected


def test_the_waste_of_an_engine_is_looked_at_in_equal_intervals() -> None:
    now_s, looks = [10.0], iter([(100, 10), (300, 10)])
    waste = KVWaste()
    assert waste.share != waste.share, "nan"

    def stats() -> SimpleNamespace:
        allocated, empty = next(looks)
        return SimpleNamespace(allocated_slots=allocated, empty_slots=empty)

    watch = EngineWatch(stats, waste, lambda: now_s[0])  # type: ignore[arg-type,return-value]
    for passed_s in (0.0, 0.9 * PERIOD_S, 0.2 * PERIOD_S):
        now_s[0] += passed_s
        watch()
    assert (waste.allocated, waste.empty, waste.share) == (400, 20, 0.05)


METRICS = """# TYPE tandem:kv_allocated_slots gauge
tandem:kv_allocated_slots{model_name="m",engine="g1"} 64
tandem:kv_allocated_slots{model_name="m",engine="g2"} 16
tandem:kv_empty_slots{model_name="m",engine="g1"} 5
tandem:kv_empty_slots{model_name="m",engine="g2"} 3
"""


class Noted(KVWaste):
    """Says when it was told something."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    def add(self, allocated: float, empty: float) -> None:
        super().add(allocated, empty)
        self.told.set()


@pytest.mark.parametrize("status", [200, 500])
async def test_the_waste_of_a_service_is_read_from_the_metrics_of_all_groups(status: int) -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text=METRICS, status=status)

    app, waste = web.Application(), Noted()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        watching = watched(session, str(server.make_url("")).rstrip("/"), waste)
        if status == 200:
            async with watching:
                await waste.told.wait()
            assert waste.share == 0.1 and waste.allocated % 80 == 0
        else:
            with pytest.raises(aiohttp.ClientResponseError):
                async with watching as looking:
                    await asyncio.wait([looking])
