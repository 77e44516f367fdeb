"""ParentWatch over a real connection: one that is there before anybody could look at it does not end a healthy rank."""

import threading
from typing import Any

import pytest
import zmq

from tandem.workers.messages.channel import ChannelContext, bind_router, dealer_to, new_secret
from tandem.workers.rank import rank_watch
from tandem.workers.rank.rank_watch import ParentWatch

CONNECT_S = 0.3


class AtOnce:
    """A socket whose handshake is over when connect() returns, as where this process waits for a core meanwhile."""

    def __init__(self, socket: "zmq.Socket[Any]", router: "zmq.Socket[Any]") -> None:
        self._socket, self._router = socket, router
        self.get_monitor_socket, self.disable_monitor = socket.get_monitor_socket, socket.disable_monitor

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)
        self._socket.send(b"hello")
        assert self._router.poll(10_000), "the router has not heard of it"


@pytest.mark.parametrize("is_there", [True, False])
def test_only_a_coordinator_that_does_not_come_ends_a_rank(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(rank_watch, "end_process", ended.set)
    monkeypatch.setattr(rank_watch, "CONNECT_S", CONNECT_S)
    context, secret = ChannelContext(), new_secret()
    router, endpoint = bind_router(context, secret)
    if not is_there:
        router.close(0)
    socket = dealer_to(context, secret, endpoint, b"0")
    watched: Any = AtOnce(socket, router) if is_there else socket
    watch = ParentWatch(watched, endpoint)
    assert ended.wait(3 * CONNECT_S if is_there else 10.0) == (not is_there)
    watch.stop()
    context.destroy(0)
