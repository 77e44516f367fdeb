"""`tandem reaper`: a small process that outlives a launcher that was killed (kill -9) and ends what it left running.

Ray's own processes die with the launcher, but the workers they started take minutes to notice. Every process of a
private Ray runs in the launcher's private empty folder: that is how they are found (their environment is overwritten
by their titles, their parent is gone).
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import setproctitle

ROUNDS = 20
ROUND_S = 0.25


class Reaper:
    """The launcher's end: closing the pipe, or dying, sets the reaper to work."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.reaper", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """Everything was taken down in order: there is nothing to reap."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


def main() -> None:
    """Waits for the end of standard input, then ends the orphans and removes their folder."""
    folder = Path(sys.argv[1])
    setproctitle.setproctitle("tandem reaper")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while sys.stdin.buffer.read(1):
        pass
    for _ in range(ROUNDS):  # a worker that was just being started shows up in a later round
        found = orphans(folder)
        for process in found:
            process.kill()
        psutil.wait_procs(found, timeout=ROUND_S)
        if not found:
            break
    shutil.rmtree(folder, ignore_errors=True)


def orphans(folder: Path) -> list[psutil.Process]:
    """Processes that run in the private folder."""
    wanted, found = str(folder / "empty"), []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == wanted:
                found.append(process)
        except psutil.Error:
            continue  # another user's, or gone by now
    return found


if __name__ == "__main__":
    main()
