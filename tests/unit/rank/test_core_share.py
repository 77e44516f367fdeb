"""Names in the kernel by which ranks count each other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.configs import limits
from tandem.workers.platforms import core_share
from tandem.workers.platforms.core_share import CoreShare

HOLD = """
import sys
from tandem.workers.platforms.core_share import CoreShare
share = CoreShare(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""
CORES = f"of-{os.getpid()}"


def test_a_process_counts_until_it_ends_however_it_ends() -> None:
    mine = CoreShare(CORES)
    elsewhere = CoreShare(f"{CORES}-other")
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, CORES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
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


def test_who_has_other_cores_or_another_containers_limit_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    affinity, limit, container = [{0, 1}], [None], ["pid:[1]"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: affinity[0])
    monkeypatch.setattr(os, "readlink", lambda path: container[0])
    monkeypatch.setattr(core_share, "cpu_limit", lambda: limit[0])
    words = [core_share._own_cores()]
    container[0] = "pid:[2]"
    assert core_share._own_cores() == words[0], "without a limit they have the same cores"
    limit[0] = 1.0  # type: ignore[call-overload]
    words.append(core_share._own_cores())
    container[0] = "pid:[3]"
    words.append(core_share._own_cores())
    limit[0], affinity[0] = None, {2, 3}
    words.append(core_share._own_cores())
    assert len({*words}) == 4
    assert limits.cpu_limit(Path("/nowhere")) is None
