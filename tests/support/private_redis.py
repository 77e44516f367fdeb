"""Private Redis servers for tests, in short folders: one of a test's own, and one that tests get after each other."""

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tandem.cluster.process.redis_server import RedisServer
from tandem.configs.environment import short_temp_folder

EMPTYING = (b"FLUSHALL", b"SCRIPT FLUSH", b"CONFIG SET maxmemory 0", b"ACL SETUSER default on nopass +@all")
ANSWER_S = 2.0


@contextmanager
def private_redis(listen: tuple[str, int, str] | None = None) -> Iterator[RedisServer]:
    """listen: host, port and password; None: a unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="tr-", dir=short_temp_folder()))
    server = RedisServer(folder / "redis", listen=listen)
    server.start()
    try:
        yield server
    finally:
        if server.pid is not None and server.is_alive():
            os.kill(server.pid, signal.SIGKILL)  # asked to end, it may take half a second, until its housekeeping
        server.stop()
        shutil.rmtree(folder)


class ReusedRedis:
    """A server for one test after the other, as each start takes a process. Who has ended, started or frozen it, or
    made it refuse, is the last to have it."""

    def __init__(self) -> None:
        self._kept = ExitStack()
        self._server: RedisServer | None = None
        self._pid: int | None = None

    def empty(self) -> RedisServer:
        """Returns a server without data that answers."""
        if self._server is None or self._server.pid != self._pid or not _emptied(self._server):
            self.close()
            self._server = self._kept.enter_context(private_redis())
            self._pid = self._server.pid
        return self._server

    def close(self) -> None:
        self._kept.close()


def _emptied(server: RedisServer) -> bool:
    """Whether the server did all that makes it a new one. What earlier clients have sent is done before its first
    answer."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(ANSWER_S)
            client.connect(str(server.socket_path))
            with client.makefile("rb") as reader:
                for command in (b"PING", *EMPTYING):
                    client.sendall(command + b"\r\n")
                    if not reader.readline().startswith((b"+PONG", b"+OK")):
                        return False
    except OSError:
        return False
    return True
