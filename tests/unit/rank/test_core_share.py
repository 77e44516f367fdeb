"""Names in the kernel by which ranks count each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.workers.platforms import core_share
from tandem.workers.platforms.core_share import CoreShare

HOLD = """
import os, sys
os.getpid = lambda: int(sys.argv[2])  # as in another container of this network
from tandem.workers.platforms.core_share import CoreShare
share = CoreShare(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""
CORES = f"of-{os.getpid()}"


def test_a_process_counts_until_it_ends_however_it_ends() -> None:
    mine = CoreShare(CORES)
    elsewhere = CoreShare(f"{CORES}-other")
    command = [sys.executable, "-c", HOLD, CORES, str(os.getpid())]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert (mine.ranks(), elsewhere.ranks()) == (2, 1)
    finally:
        other.kill()
        other.wait()
    assert mine.ranks() == 1
    mine.close()
    elsewhere.close()
    assert mine.ranks() is None


def test_a_system_that_does_not_list_names_tells_nothing(tmp_path: Path) -> None:
    share = CoreShare(CORES, names=tmp_path / "none")
    assert share.ranks() is None
    share.close()


def test_who_has_other_cores_or_another_containers_limit_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    affinity, limit = [{0, 1}], [None]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity[0])
    monkeypatch.setattr(core_share, "cpu_limit", lambda: limit[0])

    def in_group(name: str) -> str:
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.setattr(core_share, "CGROUP", tmp_path / name)
        return core_share._own_cores()

    assert in_group("one") == in_group("two"), "without a limit they have the same cores"
    words = [in_group("one")]
    limit[0] = 1.0  # type: ignore[call-overload]
    words += [in_group("one"), in_group("two")]
    assert in_group("one") == words[1], "ranks of one container count"
    limit[0], affinity[0] = None, {2, 3}
    words.append(in_group("one"))
    assert len({*words}) == 4
