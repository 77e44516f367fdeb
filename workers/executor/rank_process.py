"""Start of a process as a rank: the imports, and the command line of ranks that local_ranks.py starts.

Torch-free until a rank is run. Ranks as Ray actors (cluster/group/ray_ranks.py) share the way of importing.
"""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.workers.rank.rank_watch import watch_stdin

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY",
)  # fmt: skip
"""Variables by which others choose threads. torch's libraries look once, when they are imported. Bound threads would be
on the same first cores in each rank of a machine, and a rank would take its main thread's one core for all that it may
use."""


@contextmanager
def rank_imports() -> Iterator[None]:
    """Imports torch for a rank that chooses its threads itself.

    Turns garbage collection off meanwhile: what imports make stays, and the garbage collector would walk all of it
    again and again: a fifth of the time that a rank's imports take. It never looks at these objects later either."""
    for name in THREAD_VARIABLES:
        os.environ.pop(name, None)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def main() -> None:
    """Command line of a rank process; the secret is the first line of standard input."""
    parser = argparse.ArgumentParser(description="One rank of a Tandem group; started by its coordinator.")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--group", required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format=f"rank {arguments.rank} %(levelname)s %(name)s: %(message)s")
    secret = _read_line(sys.stdin.fileno())
    watch_stdin()
    with rank_imports():
        from tandem.workers.rank.rank_server import run_rank
    status = run_rank(arguments.rank, arguments.endpoint, secret, group=arguments.group)
    logging.shutdown()
    os._exit(status)  # threads of collective libraries must not hold up the end


def _read_line(descriptor: int) -> str:
    """One line, unbuffered, so that nothing after it is taken."""
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


if __name__ == "__main__":
    main()
