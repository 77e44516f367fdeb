"""Cores that a process may use: those of its affinity, or fewer where its container has a limit."""

import os
from pathlib import Path

import pytest

from tandem.configs.cores import available_cores


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "350000 100000\n"}, 3),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": ""}, 8),
        ({}, 8),
    ],
)
def test_a_container_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == cores
