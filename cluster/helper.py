"""A process beside the service (the private Redis, the host tier) that the launcher keeps running.

The service serves without it for a while, so one that cannot be started again never ends the service: it is tried again
each period, and said once.
"""

from collections.abc import Callable
from typing import Protocol

from configs.errors import SettingsError


class Startable(Protocol):
    """RedisServer, HostProcess."""

    def start(self) -> None:
        """SettingsError or OSError when it cannot be started; it may be called again."""
        ...

    def is_alive(self) -> bool: ...


class Helper:
    """`name` begins the lines that `say` gets; `meanwhile` says what its absence means."""

    def __init__(self, process: Startable, name: str, meanwhile: str, say: Callable[[str], None]) -> None:
        self._process = process
        self._name = name
        self._meanwhile = meanwhile
        self._say = say
        self._failed = False

    def restart_if_dead(self) -> None:
        """For the start of the service, which needs it. SettingsError or OSError when it cannot be started again."""
        if not self._process.is_alive():
            self._say(f"{self._name} died and is started again; {self._meanwhile}")
            self._process.start()

    def keep(self) -> None:
        """Once a period while the service serves."""
        if self._process.is_alive():
            return
        if not self._failed:
            self._say(f"{self._name} died and is started again; {self._meanwhile}")
        try:
            self._process.start()
        except (SettingsError, OSError) as error:
            if not self._failed:
                self._say(f"{self._name} cannot be started again, and is tried again and again: {error}")
            self._failed = True
        else:
            if self._failed:
                self._say(f"{self._name} runs again")
            self._failed = False
