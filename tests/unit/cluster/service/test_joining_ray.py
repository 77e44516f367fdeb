"""Whether a Ray that is to be joined asks for tokens, by what its GCS answers to a call without one."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray

from tandem.cluster.deploy.ray_tokens import asks_for_token
from tandem.cluster.service import ray_node
from tandem.configs.errors import SettingsError, TandemError


class Gcs(grpc.GenericRpcHandler):
    """Answers every call, or refuses those without a token."""

    def __init__(self, asks: bool) -> None:
        self.asks = asks
        self.calls: list[str] = []

    def service(self, details: Any) -> Any:
        self.calls.append(details.method)

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if self.asks:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: Authentication token is missing")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def gcs(asks: bool) -> Iterator[tuple[str, Gcs]]:
    server, handler = grpc.server(ThreadPoolExecutor(1)), Gcs(asks)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("0.0.0.0:0")  # Ray asks this machine's address where it is told the loopback's
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("asks", "may_be_open", "joins"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_a_ray_without_tokens_is_joined_only_when_that_is_accepted(
    asks: bool, may_be_open: bool, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gcs(asks) as (address, handler):
        monkeypatch.setattr(ray, "init", lambda **_: None)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))
        if joins:
            ray_node.join(address, may_be_open=may_be_open)
        else:
            with pytest.raises(
                SettingsError, match=r"127\.0\.0\.1:\d+: .*RAY_AUTH_MODE=token.*--allow-unauthenticated-ray"
            ) as caught:
                ray_node.join(address, may_be_open=may_be_open)
            assert caught.value.flag == "--address"
        assert asks_for_token(address, "--address", "--allow-unauthenticated-ray") is asks
        assert set(handler.calls) == {"/ray.rpc.NodeInfoGcsService/GetClusterId"}


def test_an_answer_that_does_not_tell_is_not_taken_for_a_refusal() -> None:
    server = grpc.server(ThreadPoolExecutor(1))  # which knows no such call
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with pytest.raises(SettingsError, match=r"UNIMPLEMENTED.*--allow-unauthenticated-ray"):
            asks_for_token(f"127.0.0.1:{port}", "--address", "--allow-unauthenticated-ray")
    finally:
        server.stop(None).wait()


def test_a_private_ray_that_does_not_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.\nMore of it")

    monkeypatch.setattr(ray_node, "start_node", fails)
    with pytest.raises(TandemError) as told:
        ray_node.start_private(tmp_path, tmp_path, 1, 0)
    words = "The current node timed out during startup. Other work may keep the cores busy; start again then."
    assert str(told.value) == f"Ray does not start: {words}"


def test_a_head_that_is_not_reached_is_named_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray.init() would try for a minute and more."""
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it is asked"))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", head)
        for address in (head, "auto"):
            with pytest.raises(
                SettingsError, match=f"{address}: no Ray cluster answers there: .*{head[-6:]}"
            ) as caught:
                ray_node.join(address)
            assert caught.value.flag == "--address"
