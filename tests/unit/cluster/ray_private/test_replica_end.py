"""Serve's and Ray's words to a replica that it is to end."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import worker as ray_worker
from ray.serve._private import replica as serve_replica

from tandem.cluster.ray_private import replica_end
from tandem.cluster.ray_private.replica_end import (
    DRAINING_NAME,
    EXIT_NAME,
    on_sigterm,
    on_taken_down,
    skip_draining_period,
)


def rays_handler() -> Any:
    """A handler like the one that Ray's worker installs, in the same module."""
    namespace: dict[str, Any] = {}
    exec(f"def handler(signum, frame):\n    {EXIT_NAME}('told', exit_code=1)", vars(ray_worker), namespace)
    return namespace["handler"]


def test_sigterm_calls_us_instead_of_ending_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, EXIT_NAME, getattr(ray_worker, EXIT_NAME))
    handler = rays_handler()
    with pytest.raises(SystemExit):
        handler(signal.SIGTERM, None)
    monkeypatch.setattr(replica_end.signal, "getsignal", lambda number: handler)
    calls: list[str] = []
    on_sigterm(lambda: calls.append("told"))
    handler(signal.SIGTERM, None)
    assert calls == ["told"]


@pytest.mark.parametrize(
    "handler", [signal.SIG_DFL, None, lambda number, frame: None], ids=["default", "none", "other"]
)
def test_a_handler_that_is_not_known_stays(
    handler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = getattr(ray_worker, EXIT_NAME)
    monkeypatch.setattr(replica_end.signal, "getsignal", lambda number: handler)
    on_sigterm(lambda: None)
    assert getattr(ray_worker, EXIT_NAME) is before
    assert "SIGTERM handler is not known" in caplog.text


class Replica:
    """Serve's side of a replica."""

    def __init__(self, said: list[str]) -> None:
        self.said = said

    async def perform_graceful_shutdown(self) -> None:
        self.said.append("waits for requests")


async def test_a_replica_hears_that_it_is_taken_down_before_serve_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    actor = SimpleNamespace(_replica_impl=Replica(said))
    monkeypatch.setattr(ray_worker.global_worker, "actors", {"id": actor})
    on_taken_down(lambda: said.append("hears"))
    # as Serve's actor passes the controller's call on
    await serve_replica.ReplicaActor.perform_graceful_shutdown(actor)
    assert said == ["hears", "waits for requests"]


def test_without_a_replica_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_worker.global_worker, "actors", {})
    on_taken_down(lambda: None)
    assert "this Serve's replica is not known" in caplog.text


def test_a_gateway_with_a_port_of_its_own_waits_for_no_load_balancer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serve_replica, DRAINING_NAME, 30.0)
    skip_draining_period()
    assert getattr(serve_replica, DRAINING_NAME) == 0 and not caplog.text
    monkeypatch.delattr(serve_replica, DRAINING_NAME)
    skip_draining_period()
    assert "draining period is not known" in caplog.text
