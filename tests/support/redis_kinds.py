"""Redis servers as others run them: behind sentinels, in cluster mode."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tandem.cluster.process.redis_server import find_binary
from tandem.cluster.ray_private.local_node import is_listening
from tests.support.service import wait_for


@contextmanager
def redis_process(folder: Path, *lines: str, is_sentinel: bool = False) -> Iterator[None]:
    """One server with a file of these lines, in a folder of its own, which it may rewrite."""
    folder.mkdir()
    config = folder / "redis.conf"
    config.write_text("\n".join([*lines, f"dir {folder}", f"logfile {folder / 'log'}", "bind 127.0.0.1"]) + "\n")
    process = subprocess.Popen([find_binary(), str(config), *(["--sentinel"] if is_sentinel else [])])
    try:
        port = next(line.split()[1] for line in lines if line.startswith("port "))
        wait_for(lambda: is_listening(f"127.0.0.1:{port}"), 30, "it listens")
        yield
    finally:
        process.kill()
        process.wait(30)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on, each another one."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]
