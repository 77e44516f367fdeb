"""What a player did and saw, line by line: printed, and kept in a file."""

import re
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tests.support.service import REPOSITORY

T = TypeVar("T")
NOISE = (" VVINFO ", "refers to a file", "To ensure this mount")
"""Ray's own ssh commands, each a long line, and its warnings on mounts of single files."""
COLORS = re.compile(r"\x1b\[[0-9;]*m")


class LaunchError(AssertionError):
    """A launch did not do what its files say; has the command and what it said last."""


class Record:
    """A context manager: the file of one player. path: where it is kept."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._began_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.say("it launched, served and ended" if error is None else f"FAILED: {error}")
        self._file.close()

    def say(self, line: str) -> None:
        """Write a line of the player's own, with the seconds since it began."""
        self._write(f"[{time.monotonic() - self._began_s:5.0f} s] {line}")

    def told(self, process: "subprocess.Popen[str]", command: str, timeout_s: float) -> str:
        """Write what a command says, and return it when it has ended well. LaunchError else."""
        for line in f"$ {command.strip()}".splitlines():
            self._write(line)
        assert process.stdout is not None
        deadline_s, said = time.monotonic() + timeout_s, list[str]()
        for line in process.stdout:
            line = COLORS.sub("", line).replace("\r", "")
            said.append(line)
            if not any(words in line for words in NOISE):
                self._write(f"  {line.rstrip()}")
            if time.monotonic() > deadline_s:
                process.kill()
        status = process.wait(timeout_s)
        if status:
            raise LaunchError(f"commands that begin with `{command.split()[0]}` ended with {status}: {last(said)}")
        return "".join(said)

    def wait_for(self, condition: Callable[[], T], timeout_s: float, what: str) -> T:
        """Wait for the condition's first true value, and say how long that took. LaunchError beyond the time."""
        began_s = time.monotonic()
        while not (value := condition()):
            if time.monotonic() > began_s + timeout_s:
                raise LaunchError(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(0.5)
        self.say(f"{what} (waited {time.monotonic() - began_s:.0f} s)")
        return value

    def _write(self, line: str) -> None:
        line = line.replace(str(REPOSITORY), ".")
        print(line, flush=True)
        self._file.write(f"{line}\n")
        self._file.flush()


def check(is_so: bool, what: str) -> None:
    """Raises LaunchError saying what is not so."""
    if not is_so:
        raise LaunchError(f"it is not so: {what}")


def last(lines: Iterable[str], count: int = 5) -> str:
    """The last lines of a text, as one."""
    return " ".join(line.strip() for line in [*lines][-count:])
