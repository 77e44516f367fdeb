"""An operator's hour: two groups under load from `tandem bench`, `tandem top`, the pages, a real Prometheus with our
alerts and every panel of our dashboard; a killed rank, and what became of one of its requests in lines, `tandem
explain` and traces; a planned end; an upgrade of the service with the same state; the end. No request fails; none is
sent while the service is replaced.
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.otlp_receiver import Receiver, over_grpc
from tests.support.plain_http import plain_http
from tests.support.service import REPOSITORY, Service, free_port, is_alive, run_tandem, tandem_serve, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]
LOAD = ("--num-prompts", "240", "--request-rate", "16", "--random-input-len", "24", "--random-output-len", "96")
PANELS = json.loads((REPOSITORY / "configs" / "grafana" / "tandem.json").read_text())["panels"]


@pytest.fixture(scope="module")
def receiver() -> Iterator[tuple[Receiver, str]]:
    with over_grpc() as found:
        yield found


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def serving(state: Path, endpoint: str) -> Any:
    own = ("demo", "-dp", "2", "--device", "cpu", "--dtype", "float32", "--state-dir", str(state))
    logs = ("--enable-log-requests", "--log-format", "json", "--otlp-traces-endpoint", endpoint)
    return tandem_serve(*own, *logs, "--shutdown-timeout", "60", "--record-mib", "8")


def verb(service: Service, *words: str, timeout_s: float = 60.0) -> str:
    done = run_tandem(*words, "--url", service.url, temp=service.temp, timeout_s=timeout_s)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout


def bench(service: Service, folder: Path, name: str) -> dict[str, Any]:
    """One run of the load client; what it found."""
    where = ("--save-result", "--result-dir", str(folder), "--result-filename", f"{name}.json", "--disable-tqdm")
    verb(service, "bench", "serve", *LOAD, *where, "--ignore-eos", timeout_s=280)
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def groups(service: Service) -> dict[str, dict[str, Any]]:
    """Those that serve, by id."""
    found = service.get("/admin/groups").json()["data"]
    return {group["id"]: group for group in found if group["state"] == "serving"}


@contextmanager
def prometheus(service: Service, folder: Path) -> Iterator[str]:
    """A server that scrapes the service twice a second with our rules; its address."""
    port = free_port()
    config = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(REPOSITORY / "configs" / "prometheus" / "alerts.yaml")],
        "scrape_configs": [
            {"job_name": "tandem", "static_configs": [{"targets": [service.url.removeprefix("http://")]}]}
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            wait_for(lambda: is_listening(port) or server.poll() is not None, 30, "Prometheus listens")
            yield f"http://127.0.0.1:{port}/api/v1"
        finally:
            server.terminate()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def asked(address: str, path: str, **query: str) -> Any:
    answer = plain_http.get(f"{address}/{path}", params=query, timeout=10).json()
    assert answer["status"] == "success", (query, answer)
    return answer["data"]


def of_panel(expression: str) -> str:
    """An expression of the dashboard as Grafana would ask it."""
    variables = {"${prefix}": "tandem", "$model_name": ".+", "$engine": ".+", "$tenant": ".+", "$__rate_interval": "5s"}
    for name, value in variables.items():
        expression = expression.replace(name, value)
    return expression


def check_prometheus(address: str) -> None:
    """Every panel's question is understood, most have data soon, and no alert fires at a healthy service."""
    expressions = [of_panel(target["expr"]) for panel in PANELS for target in panel.get("targets", [])]

    def num_filled() -> int:
        return sum(bool(asked(address, "query", query=one)["result"]) for one in expressions)

    assert len(expressions) > 20
    wait_for(lambda: num_filled() > 0.6 * len(expressions), 60, "most panels have data", period_s=0.5)
    firing = [alert for alert in asked(address, "alerts")["alerts"] if alert["state"] == "firing"]
    assert not firing, firing


def moved_request(service: Service, receiver: Receiver) -> str:
    """The id of a request with two attempts, by its spans; how many a request has is in no line."""

    def found() -> str | None:
        attempts: dict[str, int] = {}
        for span in list(receiver.spans):
            attempts[span.trace_id] = attempts.get(span.trace_id, 0) + (span.name == "attempt")
        moved = {trace for trace, count in attempts.items() if count > 1}
        roots = (s for s in list(receiver.spans) if s.name == "llm_request" and s.trace_id in moved)
        return next((str(span.attributes["gen_ai.request.id"]) for span in roots), None)

    return str(wait_for(found, 30, "the spans of a request that moved"))


def test_an_operators_hour(receiver: tuple[Receiver, str], state: Path, tmp_path: Path) -> None:
    spans, endpoint = receiver
    with serving(state, endpoint) as service, ThreadPoolExecutor(1) as pool:
        wait_for(lambda: len(groups(service)) == 2, 60, "both groups serve")
        kept = service.post("/v1/responses", {"model": "demo", "input": "Tell me a story.", "store": True}).json()["id"]
        for path in ("/", "/docs"):
            assert "<html" in service.get(path).text

        load = pool.submit(bench, service, tmp_path, "killed")
        wait_for(lambda: service.metric("num_requests_running") > 2, 60, "the load has begun")
        table = verb(service, "top", "--once")
        assert table.count(" serving ") == 2, table
        rank = service.titled("tandem rank")[0]
        rank.kill()
        wait_for(lambda: not is_alive(rank), 10, "the rank has died")
        result = load.result()
        assert (result["completed"], result["failed"]) == (240, 0)
        wait_for(lambda: len(groups(service)) == 2, 60, "the group is replaced")

        wait_for(lambda: service.metric("group_starts_total") == 3, 10, "the start of the new one is counted")
        assert service.metric("group_losses_total") == 1
        lost = verb(service, "status")
        assert "groups lost 1 since the start; the last " in lost
        (recording,) = service.state.rglob("*.recording")
        assert f"its last steps are in {recording}" in lost, "what is said of the loss names its recording"
        replayed = run_tandem("replay", str(recording), temp=service.temp)
        assert replayed.returncode == 0 and replayed.stdout.endswith("steps, all plans equal\n"), replayed
        moved = moved_request(service, spans)
        why = verb(service, "explain", moved)
        assert why.startswith(f"request {moved}: length after") and "until it was sent again" in why, why
        lines = [json.loads(line) for text in service.log_files().values() for line in text.splitlines()]
        assert {"outcome"} <= {key for line in lines if line.get("request_id") == moved for key in line}
        told = [line["message"] for line in lines if "goes to another group" in line["message"]]
        assert any(f"request {moved} goes" in text for text in told), "by the id that all else has"
        assert any("rank" in line["message"] and line["levelname"] in ("WARNING", "ERROR") for line in lines)

        load = pool.submit(bench, service, tmp_path, "drained")
        wait_for(lambda: service.metric("num_requests_running") > 2, 60, "the load has begun")
        before = set(groups(service))
        verb(service, "drain", min(before), timeout_s=150)
        if shutil.which("prometheus"):
            with prometheus(service, tmp_path) as address:
                check_prometheus(address)
        result = load.result()
        assert (result["completed"], result["failed"]) == (240, 0)
        wait_for(lambda: len(after := set(groups(service))) == 2 and min(before) not in after, 60, "another serves")
        assert service.stop() == 0, service.output
        service.check_gone()

    began_s = time.monotonic()
    with serving(state, endpoint) as upgraded:
        print(f"the service answered again after {time.monotonic() - began_s:.1f} s")
        assert upgraded.get(f"/v1/responses/{kept}").json()["id"] == kept
        wait_for(lambda: "serving demo with 2 groups" in upgraded.output, 60, "all of it is up")
        assert upgraded.stop() == 0, upgraded.output
        upgraded.check_gone()
