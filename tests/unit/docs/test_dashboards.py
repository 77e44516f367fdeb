"""The dashboard and the alert rules: metrics that exist, Grafana's form, rules that fire and are silent in time."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tandem.cluster.fleet.engine_metrics import Families, add_groups
from tandem.cluster.fleet.group_events import GroupTally
from tandem.cluster.gateway.http.gateway_metrics import GatewayMetrics
from tests.support.metric_names import absent_names, sample_names, stock_names
from tests.unit.cluster.fleet.test_metrics_text import reports, served
from tools import dashboards

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
ALERTS = CONFIGS / "prometheus" / "alerts.yaml"
CASES = Path(__file__).parent / "alert_cases.yaml"


def names_of_a_service_with_everything() -> set[str]:
    metrics = GatewayMetrics(CollectorRegistry(), "tandem", "m")
    metrics.http_answered("/v1/models", 200)
    metrics.text_worked("t", 0.1, waited_s=None)
    families = Families("tandem")
    add_groups(families, ["serving"], GroupTally())
    texts = served(reports()), families.text(), generate_latest(metrics.registry).decode()
    return set().union(*map(sample_names, texts))


def test_the_file_is_what_the_table_makes() -> None:
    assert dashboards.PLACE.read_text() == dashboards.text(), "run python -m tools.dashboards"
    made = json.loads(dashboards.text())
    panels = [inner for panel in made["panels"] for inner in (panel, *panel.get("panels", ()))]
    assert len({panel["id"] for panel in panels}) == len(panels) == sum(map(len, dashboards.ROWS.values())) + 9
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(places)


def test_each_panel_asks_for_metrics_that_there_are() -> None:
    known = names_of_a_service_with_everything()
    missing = {row: absent for row in dashboards.ROWS if (absent := dashboards.families(row) - known)}
    assert not missing


def test_stock_dashboards_of_others_find_their_metrics() -> None:
    """By the prefix `vllm`, and for Ray Serve LLM's by the rule of docs/operations.md, which gives them its names."""
    asked = stock_names()
    assert {"request_decode_time_seconds_sum", "request_time_per_output_token_seconds", "kv_cache_usage_perc"} <= asked
    assert not absent_names(asked, names_of_a_service_with_everything())
    page = (CONFIGS.parent / "docs" / "operations.md").read_text()
    (config,) = re.findall(r"^( {4}scrape_configs:\n(?: {4}.*\n)+)", page, re.MULTILINE)
    (job,) = yaml.safe_load(config)["scrape_configs"]
    (rule,) = job["metric_relabel_configs"]
    named = [re.sub(f"^(?:{rule['regex']})$", rule["replacement"].replace("$1", r"\1"), f"vllm:{n}") for n in asked]
    assert sorted(named) == sorted(f"ray_vllm_{name}" for name in asked)


def test_each_rule_asks_for_metrics_that_there_are() -> None:
    known, rules = names_of_a_service_with_everything(), yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    asked = {rule["alert"]: set(re.findall(r"\btandem:(\w+)", rule["expr"])) for rule in rules}
    assert all(asked.values()) and not {alert: names - known for alert, names in asked.items() if names - known}
    tried = CASES.read_text()
    assert not [alert for alert in asked if tried.count(alert) < (1 if alert == "TandemNoGroup" else 2)]


def test_rules_fire_when_they_should(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    for file, name in ((ALERTS, "alerts.yaml"), (CASES, "cases.yaml")):
        shutil.copy(file, tmp_path / name)
    for verb in (["check", "rules", "alerts.yaml"], ["test", "rules", "cases.yaml"]):
        run = subprocess.run([promtool, *verb], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr
