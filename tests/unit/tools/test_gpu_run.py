"""One run on a GPU: the whole of it, small, on a CPU; stages that fail, hang or have no time left."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tools import gpu_run
from tools.gpu_run import STAGES, Run, Stage, chosen, said
from tools.gpu_table import TABLES, table

ROOT = Path(__file__).resolve().parents[3]


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]


def test_all_stages_run_on_a_cpu(tmp_path: Path) -> None:
    """From another folder, as nothing of the tree is installed on the machines that it is for."""
    command = [sys.executable, str(ROOT / "tools" / "gpu_run.py"), str(tmp_path / "found"), "--dry", "--budget", "900"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(tmp_path / "found")
    ended = {line["stage"]: line["status"] for line in lines if "status" in line and "name" not in line}
    assert ended == {stage.name: "ok" for stage in STAGES}
    assert {case for _, case, _, _ in TABLES} <= {line.get("case") for line in lines}, "a figure of every table"
    steps = [line for line in lines if line.get("case") == "steps"]
    assert {line["kv_cache_dtype"] for line in steps} == {"auto", "fp8", "int8"}
    assert {line["lengths"] for line in steps} == {"uniform", "mixed", "one-long"}
    assert {"replayed", "drawn"} <= set(steps[0]) and "eager" in {key for line in steps for key in line}
    assert {line["weights"] for line in steps} == {"none", "int4", "fp8"}
    parts = {line["part"] for line in lines if line.get("case") == "ceilings"}
    assert parts == {"nodes", "products", "attention", "codes", "experts"}
    gaps = [line["gap_ms"] for line in lines if line.get("case") == "mixed load"]
    assert all(gap["p50"] <= gap["p99"] <= gap["max"] for gap in gaps)
    checks = [line for line in lines if line["stage"] == "checks" and "name" in line]
    assert [check["status"] for check in checks] == ["not here"]
    assert (tmp_path / "found" / "table.txt").read_text() == done.stdout
    assert "==== tests" in (tmp_path / "found" / "log.txt").read_text()


HANGS = """
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(json.dumps({"case": "pid", "pid": child.pid}), flush=True)
print("still at it", flush=True)
time.sleep(300)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stages import their modules from."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sources = {
        "hangs": HANGS,
        "fails": "print('before')\nraise OSError('no such GPU')",
        "works": "print('{\"case\": 1}')",
    }
    sources["wrong"] = 'print(\'{"name": "a", "status": "failed", "detail": "it is 3"}\')'
    for name, source in sources.items():
        (tmp_path / f"stage_{name}.py").write_text(source)
    return tmp_path


def run_of(out: Path, stages: dict[str, float], budget_s: float) -> tuple[bool, list[dict[str, Any]]]:
    run = Run(out, budget_s, dry=False)
    try:
        is_well = run.run([Stage(name, limit_s, f"stage_{name}", "", "") for name, limit_s in stages.items()])
    finally:
        run.close()
    return is_well, lines_of(out)


def test_a_stage_that_hangs_or_fails_is_passed_over(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "RESERVE_S", 1.0)
    began_s = time.monotonic()
    is_well, lines = run_of(modules / "out", {"hangs": 6.0, "fails": 30.0, "wrong": 30.0, "works": 30.0}, 100.0)
    assert not is_well and time.monotonic() - began_s < 60
    ended = {line["stage"]: (line["status"], line["detail"]) for line in lines if "seconds" in line}
    assert ended == {
        "hangs": ("over its limit", "6 s; still at it"),
        "fails": ("failed", "OSError: no such GPU"),
        "wrong": ("failed", ""),
        "works": ("ok", "1 lines"),
    }
    (pid,) = [line["pid"] for line in lines if line.get("case") == "pid"]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    text = "\n".join(table(lines))
    assert "over its limit" in text and "failed  a  it is 3" in text


def test_the_last_stage_has_what_is_reserved_for_it(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "RESERVE_S", 30.0)
    is_well, lines = run_of(modules / "out", {"fails": 30.0, "works": 30.0}, 39.0)
    assert not is_well
    assert [(line["stage"], line["status"]) for line in lines if "seconds" in line] == [
        ("fails", "passed over"),
        ("works", "ok"),
    ]


def test_stages_are_chosen_by_name() -> None:
    assert [stage.name for stage in chosen(["tests", "facts"])] == ["facts", "tests"]
    with pytest.raises(SystemExit, match="--only cheese: the stages are facts, checks, ceilings"):
        chosen(["cheese"])


def test_tests_that_were_killed_are_counted() -> None:
    printed = ["[gw0] [ 10%] PASSED tests/gpu/a.py::one", "[gw1] [ 20%] FAILED tests/gpu/a.py::two", "[gw0] PASSED x"]
    assert said(printed) == "2 passed, 1 failed" and said([*printed, "=== 2 passed, 1 failed in 3.21s ==="]) == (
        "2 passed, 1 failed in 3.21s"
    )
