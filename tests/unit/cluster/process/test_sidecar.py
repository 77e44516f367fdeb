"""The launcher's sidecars: one that cannot be started again never ends the service, and is reported once an outage."""

from pathlib import Path
from typing import ClassVar

import pytest

from tandem.cluster.process.reaper import StatusPipe
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.process.sidecar import Sidecar
from tandem.cluster.service import launcher as launcher_file
from tandem.cluster.service.launcher import Console, Launcher
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings


class Process:
    """Dies when told; starts unless `error`."""

    def __init__(self) -> None:
        self.alive = True
        self.error: Exception | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        if self.error is not None:
            raise self.error
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive


class Printed(Console):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def print_line(self, text: str) -> None:
        self.lines.append(text)


def test_one_that_dies_is_started_again() -> None:
    process, said = Process(), Printed()
    sidecar = Sidecar(process, "it", "all goes on", said.print_line)
    sidecar.keep()
    assert not said.lines
    process.alive = False
    sidecar.keep()
    sidecar.keep()
    assert said.lines == ["it died and is started again; all goes on"] and process.starts == 1


@pytest.mark.parametrize("error", [SettingsError("no port", "--port"), OSError("disk full")])
def test_one_that_cannot_be_started_is_tried_each_period_and_reported_once(error: Exception) -> None:
    process, said = Process(), Printed()
    sidecar = Sidecar(process, "it", "all goes on", said.print_line)
    for outage in (1, 2):
        process.alive, process.error = False, error
        for _ in range(5):
            sidecar.keep()
        process.error = None
        sidecar.keep()
        sidecar.keep()
        assert process.starts == 6 * outage
        first, failed, again = said.lines[-3:]
        assert first == "it died and is started again; all goes on"
        assert failed == f"it cannot be started, and is tried again every second: {error}"
        assert again == "it runs again" and len(said.lines) == 3 * outage


def test_a_start_that_loses_a_sidecar_for_good_ends() -> None:
    process = Process()
    process.alive, process.error = False, SettingsError("no port", "--port")
    with pytest.raises(SettingsError):
        Sidecar(process, "it", "all goes on", Printed().print_line).restart_if_dead()


class Rounds:
    """Signals that come after so many periods."""

    def __init__(self, count: int) -> None:
        self._left = count

    def wait(self, timeout_s: float) -> bool:
        self._left -= 1
        return self._left < 0


def test_the_service_goes_on_without_a_redis_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server, killed; then its folder is no place for a server any more."""
    said = Printed()
    launcher = Launcher(build_settings("demo", {}), None, said, StatusPipe(-1))
    launcher._signals = Rounds(3)  # type: ignore[assignment]
    monkeypatch.setattr(launcher_file, "raylet_runs", lambda _left: True)
    folder = tmp_path / "r"
    monkeypatch.setattr(launcher_file, "RedisServer", Broken)
    try:
        launcher._start_redis(folder)
        Broken.made[0].stop()
        launcher._watch()
    finally:
        launcher._stack.close()
    died, failed = said.lines
    assert "the private Redis server died" in died and "cannot be started, and is tried again" in failed


class Broken(RedisServer):
    """Starts once."""

    made: ClassVar[list[RedisServer]] = []

    def start(self) -> None:
        if self in self.made:
            raise SettingsError("its folder is gone")
        self.made.append(self)
        super().start()
