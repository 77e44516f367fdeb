"""benchmarks/service/serve.py: both sides are the same engine, and what it reports stands beside the roofline and
a peer."""

import argparse
import io

from rich.console import Console

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
        report(OPTIONS_GIVEN, Console(file=printed, width=200), Result([one], [one], peer), 2 * one.tokens_per_s)
        assert "HTTP over offline: 1.000" in printed.getvalue() and "; HTTP reached 0.50 of it" in printed.getvalue()
        assert ("over sequential transformers: 2.00x" in printed.getvalue()) is expected
