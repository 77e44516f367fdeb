"""A private Redis for a test, in a short folder."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.cluster.process.redis_server import RedisServer
from tandem.configs.environment import short_temp_folder


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
