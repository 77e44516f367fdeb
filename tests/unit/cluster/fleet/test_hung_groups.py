"""Which coordinators are ended, which are left alone; processes and actors by stand-ins, and real stopped processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from tandem.cluster.fleet import hung_groups
from tandem.cluster.fleet.hung_groups import HungGroups, kill_stopped
from tests.support.fake_group import FakeFleet, serving

TITLE = "ray::ServeReplica:tandem:tandem-coordinator"


class FakeRemote:
    """Remembers who was asked and who was ended. `silent`: those that do not answer."""

    def __init__(self, silent: set[str]) -> None:
        self.silent = silent
        self.asked: list[str] = []
        self.ended: list[str] = []

    async def answers(self, group: str, timeout_s: float) -> bool:
        self.asked.append(group)
        if group == "broken":
            raise RuntimeError("Ray is gone")
        return group not in self.silent

    async def end(self, group: str) -> None:
        self.ended.append(group)


def titled(title: str) -> subprocess.Popen[bytes]:
    script = f"import setproctitle, time; setproctitle.setproctitle({title!r}); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    return process


@pytest.fixture
def coordinator() -> Iterator[subprocess.Popen[bytes]]:
    process = titled(TITLE)
    yield process
    process.kill()
    process.communicate()


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


class Clock:
    """Moved by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


HERE = "the id of this node"


def watch_of(remote: FakeRemote, clock: Clock | None = None, **records: tuple[str, int]) -> HungGroups:
    """A watch over groups whose records are missing, by their node and pid."""
    fleet = FakeFleet({})
    fleet.missing = [
        msgspec.structs.replace(serving(group)[group], host=host, pid=pid) for group, (host, pid) in records.items()
    ]
    return HungGroups(fleet, remote, HERE, clock or Clock())


def test_only_a_stopped_coordinator_is_killed(coordinator: "subprocess.Popen[bytes]") -> None:
    assert not kill_stopped(coordinator.pid), "it runs"
    stop(coordinator)
    assert kill_stopped(coordinator.pid)
    assert coordinator.wait(30) == -signal.SIGKILL
    assert not kill_stopped(coordinator.pid)


OTHERS = ["tandem rank g tp0 pp0", "ray::ServeReplica:tandem:tandem-gateway", "tandem-coordinator"]


@pytest.mark.parametrize("title", OTHERS)
def test_another_process_of_that_number_is_left_alone(title: str) -> None:
    process = titled(title)
    try:
        stop(process)
        assert not kill_stopped(process.pid)
    finally:
        process.kill()
        process.communicate()


async def test_a_stopped_one_of_this_machine_is_killed_without_asking(coordinator: "subprocess.Popen[bytes]") -> None:
    stop(coordinator)
    remote, clock = FakeRemote(set()), Clock()
    watch = watch_of(remote, clock, g=(HERE, coordinator.pid))
    for clock.now_s in (0.0, 3.0, 6.5):
        watch.check()
        assert coordinator.poll() is None
    clock.now_s = 7.0
    watch.check()
    await asyncio.sleep(0)
    assert coordinator.wait(30) == -signal.SIGKILL and not remote.asked


async def test_one_that_ran_between_two_stops_is_left_alone(
    coordinator: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    stop(coordinator)
    clock = Clock()
    watch = watch_of(FakeRemote(set()), clock, g=(HERE, coordinator.pid))
    computed_s = iter([1.0, 1.0, 1.5, 1.5])
    monkeypatch.setattr(hung_groups, "stopped_cpu_s", lambda pid: next(computed_s))
    for clock.now_s in (0.0, 5.0, 10.0, 15.0):
        watch.check()
    assert coordinator.poll() is None


async def test_others_are_asked_once_at_a_time_and_ended_when_they_are_silent(
    coordinator: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hung_groups, "ANSWER_S", 600.0)
    stop(coordinator)
    remote = FakeRemote({"far"})
    here, pid = HERE, coordinator.pid
    suspects = {"far": ("elsewhere", pid), "busy": (here, os.getpid()), "broken": ("elsewhere", pid)}
    watch = watch_of(remote, **suspects)
    for _ in range(3):
        watch.check()
        await asyncio.sleep(0.01)
    assert sorted(remote.asked) == ["broken", "busy", "far"]
    assert remote.ended == ["far"]
    assert coordinator.poll() is None, "a number of another machine"
    watch.close()
    monkeypatch.setattr(hung_groups, "ANSWER_S", 0.05)
    again = FakeRemote({"far"})
    watch = watch_of(again, **suspects)
    async with asyncio.timeout(30):
        while again.asked.count("busy") < 2:
            watch.check()
            await asyncio.sleep(0.01)
    watch.close()


async def test_nobody_is_ended_after_the_close() -> None:
    remote = FakeRemote({"far"})
    watch = watch_of(remote, far=("elsewhere", os.getpid()))
    watch.check()
    watch.close()
    await asyncio.sleep(0.01)  # nothing comes: time for it to come
    assert not remote.ended
