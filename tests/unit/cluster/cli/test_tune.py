"""`tandem tune`: what it measures, prints and keeps, by a device that is made up; its refusal without a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.tuning.tuning_file import read_trials
from tests.support.fake_tuner import DEVICE, FakeTuner
from tests.support.verbs import run_verb_here

A, B, C = (16, 64, 4), (16, 32, 2), (9, 9, 9)
TIMES: dict[str, Any] = {
    "attend_parts": {A: [20.0, 100.0], B: [10.0, 100.0], C: RuntimeError("out of resource: shared memory")},
    "attend_tiles": {A: [50.0], B: [60.0]},
}


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a GPU in place of this machine's device; may be changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = dict(TIMES)
    monkeypatch.setattr(CpuPlatform, "tunes", True)
    monkeypatch.setattr(CpuPlatform, "tuner", lambda self: FakeTuner(given))
    return given


def test_it_shows_before_and_after_and_keeps_the_times(times: dict[str, Any]) -> None:
    done = run_verb_here("tune", "--model", "demo", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["kernel", "load", "default,", "us", "chosen,", "us", "saved", "tile"],
        ["attend_parts", "load", "0", "20.0", "10.0", "50%", "16", "32", "2"],
        ["load", "1", "100.0", "100.0", "0%"],
        ["attend_tiles", "load", "0", "50.0", "50.0", "0%", "the", "default"],
        ["attend_parts:", "9", "9", "9", "failed:", "RuntimeError:", "out", "of", "resource:", "shared", "memory"],
    ]
    assert "5 tiles for 2 uses of kernels" in done.stderr and "2 of 2: attend_tiles, 2 tiles" in done.stderr
    assert f"kept in {DEVICE.path}" in done.stderr
    assert [trial.tile for trial in read_trials(DEVICE)["attend_parts"]] == [A, B, C]


def test_a_kernel_that_cannot_be_timed_is_said(times: dict[str, Any]) -> None:
    times["attend_tiles"] = {A: RuntimeError("no kernel image"), B: [1.0]}
    done = run_verb_here("tune", "demo", "--json", "--device", "cpu")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["device"]["gpu"] == "Fake 100" and found["uses"]["attend_parts"]["chosen"]["tile"] == [*B]
    assert found["uses"]["attend_tiles"] == {
        "default": None, "chosen": None, "tried": 1, "failed": {"16 64 4": "RuntimeError: no kernel image"},
    }  # fmt: skip


def test_without_a_gpu_or_its_kernels_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_verb_here("tune", "demo", "--device", "cpu")
    assert done.returncode == 2 and "--device: there is no GPU here whose kernels could be measured" in done.stderr
    monkeypatch.setattr(CpuPlatform, "tunes", True)
    done = run_verb_here("tune", "demo", "--device", "cpu")
    assert done.returncode == 2 and "--device: there are no kernels here to measure" in done.stderr
    done = run_verb_here("tune", "demo", "--max-num-seqs", "3")
    assert done.returncode == 2 and "--max-num-seqs" in done.stderr
