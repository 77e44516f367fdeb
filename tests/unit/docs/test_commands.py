"""The guides' commands that need no service are run as they stand: plan and check-config, and every metric is real."""

import re
import shlex
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tandem.cluster.adapters import adapter_metrics
from tandem.cluster.fleet import engine_metrics
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tandem.cluster.tenants import tenant_service
from tandem.workers.engine.base import draft_record, expert_reports, request_figures, stats
from tests.support.verbs import run_verb_here

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/serving").glob("*.md"))]
LINES = re.findall(r"^    \.venv/bin/tandem ((?:plan|check-config) .*)$", "\n".join(p.read_text() for p in PAGES), re.M)
COMMANDS = sorted({line.split(" #")[0].strip() for line in LINES if "path-or-hub-id" not in line})


def test_there_are_commands_to_run() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    done = run_verb_here(*shlex.split(command))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


def test_the_metrics_that_the_guides_list_exist() -> None:
    gateway = GatewayMetrics(CollectorRegistry(), "tandem", "demo")
    served = generate_latest(gateway.registry).decode() + generate_latest(gateway.tenants).decode()
    tables = (engine_metrics, adapter_metrics, stats, request_figures, draft_record, expert_reports)
    code = "".join(Path(str(table.__file__)).read_text() for table in tables)
    known = set(re.findall(r"^# TYPE tandem:(\w+)", served, re.M)) | set(re.findall(r'"(\w+)"|:(\w+)"', code))
    names = {name for pair in known for name in ([pair] if isinstance(pair, str) else pair)}
    names |= {
        f"usage_rows_{what}_total"
        for what in re.findall(r'f"\{name\}_(\w+)"', Path(tenant_service.__file__).read_text())
    }
    names |= {f"kv_offload_{kind}_bytes" for kind in ("load", "store", "spill", "fetch")}
    listed: set[str] = set()
    for page in ("operations.md", "multi-tenancy.md"):
        section = (ROOT / "docs" / page).read_text().partition("## Metrics")[2].partition("\n## ")[0]
        cells = re.findall(r"^\| (`.*?`) \|", section, re.M)
        listed |= {re.sub(r"\{.*", "", name) for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert len(listed) > 40
    assert not listed - names
