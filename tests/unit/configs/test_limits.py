"""Limits of a process: its container's cores, open files; connections of a gateway leave room for other files."""

import os
import resource
from pathlib import Path

import pytest

from tandem.cluster.gateway.http.http_server import HttpLimits
from tandem.configs.limits import MANY_FILES, allow_many_open_files, available_cores

NONE = resource.RLIM_INFINITY


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


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [
        (1024, 4096, 4096),
        (1024, NONE, MANY_FILES),
        (100_000, 200_000, 100_000),
        (4096, 4096, 4096),
        (NONE, NONE, MANY_FILES),
    ],
)
def test_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, allowed: int) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, given: limits.append(given))
    assert allow_many_open_files() == allowed
    assert limits[1:] in ([], [(allowed, hard)]) and (soft == NONE or limits[-1][0] == allowed)


@pytest.mark.parametrize(("open_files", "connections"), [(65_536, 8192), (4096, 3584), (256, 1)])
def test_connections_leave_room_for_other_files(open_files: int, connections: int) -> None:
    """Who comes when none is left is refused in words; without a file left, nobody could be told anything."""
    assert HttpLimits().within(open_files).connections == connections
