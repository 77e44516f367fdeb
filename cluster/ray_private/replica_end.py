"""Ends of one of Serve's replicas: Serve takes it down, or its process gets SIGTERM.

Serve calls a replica's __del__ only once it has no request left, and Ray's worker has a SIGTERM handler of its own: it
runs on the main thread, where replicas' code never runs, and waits for all calls that the process has made, as to
ranks, which never end. Both are reached by private names of Ray; where a release has others, a warning says so, and
the replica ends as Ray and Serve see fit.
"""

import logging
import signal
from collections.abc import Callable
from types import FunctionType
from typing import Any

from ray._private import worker as ray_worker
from ray.serve._private import replica as serve_replica

log = logging.getLogger("ray.serve.tandem")
EXIT_NAME = "raise_sys_exit_with_custom_error_message"
DRAINING_NAME = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"


def on_sigterm(call: Callable[[], object]) -> None:
    """Has SIGTERM call `call`, on the main thread, and do nothing else. From any thread of a Ray worker.

    Lost without it: an end in order at SIGTERM.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if not (isinstance(handler, FunctionType) and handler.__globals__ is vars(ray_worker)) or (
        EXIT_NAME not in handler.__code__.co_names
    ):
        log.warning("this Ray's SIGTERM handler is not known: SIGTERM ends this process as Ray sees fit")
        return

    def end(*arguments: Any, **options: Any) -> None:
        call()

    setattr(ray_worker, EXIT_NAME, end)  # only that handler calls it there


def on_taken_down(call: Callable[[], object]) -> None:
    """Has `call` called once Serve begins to take this replica down, before it waits for the requests in flight. From
    any thread; it is called on the loop of Serve's replica.

    Lost without it: time; the replica notices its end only once Serve has waited for its requests.
    """
    found = [
        actor._replica_impl for actor in ray_worker.global_worker.actors.values() if hasattr(actor, "_replica_impl")
    ]
    if len(found) != 1 or not hasattr(found[0], "perform_graceful_shutdown"):
        log.warning("this Serve's replica is not known: that it is taken down is noticed at its end only")
        return
    (replica,) = found
    graceful_shutdown = replica.perform_graceful_shutdown

    async def shut_down() -> None:
        call()
        await graceful_shutdown()

    replica.perform_graceful_shutdown = shut_down


def skip_draining_period() -> None:
    """Lets Serve take this replica down as soon as it has no request.

    Lost without it: 30 s, for which Serve keeps a replica with routes so that load balancers stop sending to it; of no
    use where a gateway listens on a port of its own, which it closes first.
    """
    if not hasattr(serve_replica, DRAINING_NAME):
        log.warning("this Serve's draining period is not known: this replica may stay for half a minute at its end")
        return
    setattr(serve_replica, DRAINING_NAME, 0.0)
