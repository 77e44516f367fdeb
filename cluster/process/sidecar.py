"""A process beside the service (the private Redis, the host tier) that the launcher keeps running.

The service goes on without it for a while, so a failed restart is reported once and repeated each period.
"""

from collections.abc import Callable
from typing import Protocol

from tandem.configs.errors import SettingsError


class Startable(Protocol):
    """A process that can be started again: RedisServer, HostProcess."""

    def start(self) -> None:
        """Starts the process; SettingsError or OSError when that fails."""
        ...

    def is_alive(self) -> bool:
        """True while the process runs."""
        ...


class Sidecar:
    """One such process. print_line gets lines of `name`; `meanwhile` is the part on the service without it."""

    def __init__(self, process: Startable, name: str, meanwhile: str, print_line: Callable[[str], None]) -> None:
        self._process = process
        self._name = name
        self._meanwhile = meanwhile
        self._print_line = print_line
        self._failed = False

    def restart_if_dead(self) -> None:
        """Restarts a dead process during the start of the service. SettingsError or OSError when that fails."""
        if not self._process.is_alive():
            self._print_line(f"{self._name} died and is started again; {self._meanwhile}")
            self._process.start()

    def keep(self) -> None:
        """Restarts a dead process; called once a period while the service serves."""
        if self._process.is_alive():
            return
        if not self._failed:
            self._print_line(f"{self._name} died and is started again; {self._meanwhile}")
        try:
            self._process.start()
        except (SettingsError, OSError) as error:
            if not self._failed:
                self._print_line(f"{self._name} cannot be started, and is tried again every second: {error}")
            self._failed = True
        else:
            if self._failed:
                self._print_line(f"{self._name} runs again")
            self._failed = False
