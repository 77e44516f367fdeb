"""`tandem host-tier`: a node's process that owns host memory for KV, so that it outlives ranks and coordinators.

The launcher starts it through HostProcess; coordinators and ranks call lease() and attach(). It ends with its parent,
and the memory ends with its last user: memory and socket leave nothing behind under a name. Linux only.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import setproctitle

import tandem
from tandem.configs.errors import SettingsError
from tandem.configs.limits import allow_many_open_files
from tandem.offload.host.host_client import RegionLease, SlabAttachment, attach, lease, lease_soon, status
from tandem.offload.host.host_messages import HostStatus, HostTierError
from tandem.offload.host.host_server import HostServer

__all__ = [
    "HOST_TIER_SHARE",
    "HostProcess",
    "HostStatus",
    "HostTierError",
    "RegionLease",
    "SlabAttachment",
    "attach",
    "lease",
    "lease_soon",
    "main",
    "region_bytes",
    "status",
]

FLAG = "--kv-offloading-size"
HOST_TIER_SHARE = 0.6
"""Share that tiers may take of the memory that their machine has free."""
START_TIMEOUT_S = 10.0
MAX_SOCKET_PATH_BYTES = 107


def region_bytes(gib: float) -> int:
    """Returns the memory of a region for one group's tier of that size: keys of slots take a little beside the
    slots."""
    return int(gib * 1.01 * 2**30 + 2**20)


class HostProcess:
    """One host-tier process with its socket in `folder` (made 0700). start() and stop() may be called again.

    After a restart there are no regions; users of the earlier process's memory keep it until they end.
    """

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        """Sets the socket's folder and budget_bytes, the limit for all regions on this node together."""
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self._folder / "host-tier.sock"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the process and returns when it answers. SettingsError with the last line of its log when it does
        not."""
        if sys.platform != "linux":
            raise SettingsError("the host tier needs Linux", FLAG)
        if len(os.fsencode(self.socket_path)) > MAX_SOCKET_PATH_BYTES:
            raise SettingsError(f"{self.socket_path} is too long a path for a socket", FLAG)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tandem.offload.host.host_process", "--socket", str(self.socket_path)]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--budget-bytes", str(self._budget_bytes)],
                stdin=subprocess.PIPE,  # the process ends when this pipe closes
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env={**os.environ, "PYTHONPATH": str(Path(tandem.__file__).parent.parent.absolute())},
            )
        self._wait_until_it_answers(self._process)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, timeout_s: float = 3.0) -> None:
        """Ends the process, after timeout_s by SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout_s)
        self.socket_path.unlink(missing_ok=True)

    @property
    def _log_path(self) -> Path:
        return self._folder / "host-tier.log"

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                status(self.socket_path, timeout_s=1.0)
                return
            except HostTierError as error:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    self.stop()
                    lines = self._log_path.read_text(errors="replace").strip().splitlines()
                    raise SettingsError(f"the host tier did not start: {lines[-1] if lines else error}", FLAG) from None
            time.sleep(0.005)


def main() -> None:
    """Serves until standard input ends or SIGTERM arrives. SIGINT is ignored: the launcher ends this process in its
    order."""
    parser = argparse.ArgumentParser(prog="tandem host-tier")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--budget-bytes", type=int, required=True)
    arguments = parser.parse_args()
    setproctitle.setproctitle("tandem host-tier")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the launcher blocks it in its threads
    allow_many_open_files()
    server = HostServer(arguments.socket, arguments.budget_bytes)
    try:
        server.run()
    finally:
        server.close()


if __name__ == "__main__":
    main()
