"""Proxies of the environment: gRPC between our processes meets none, this machine's own services neither, and doctor
says which there are. tests/integration/one_service and test_redeploy.py run whole services behind a dead one."""

import importlib
import os
import socket
from typing import Any

import grpc
import httpx
import psutil
import pytest

from tandem import cluster
from tandem.cluster.cli.client.endpoint import Endpoint, is_here
from tandem.cluster.cli.verbs.doctor import proxy_words
from tandem.cluster.deploy.machine_facts import read_facts
from tandem.cluster.service.ray_node import prepare_environment
from tandem.configs.environment import PROXIES
from tests.support.proxies import DEAD, DEAD_PROXIES


@pytest.fixture
def behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("grpc_proxy", raising=False)
    for name, value in DEAD_PROXIES.items():
        monkeypatch.setenv(name, value)


async def ask_over_grpc() -> bytes:
    """One call between two ends in this process, over a new channel, as Serve makes it."""

    class Echo(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            async def echo(request: bytes, context: Any) -> bytes:
                return request

            return grpc.unary_unary_rpc_method_handler(echo)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            return bytes(await channel.unary_unary("/any/call")(b"asked", timeout=20))
    finally:
        await server.stop(None)


@pytest.mark.usefixtures("behind_a_proxy")
async def test_grpc_meets_no_proxy_once_our_code_is_imported() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:  # that a proxy would be asked
        await ask_over_grpc()
    assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
    importlib.reload(cluster)
    assert await ask_over_grpc() == b"asked"


@pytest.mark.usefixtures("behind_a_proxy")
def test_rays_processes_meet_no_proxy_and_downloads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", environ := {**os.environ, "RAY_grpc_enable_http_proxy": "1"})
    prepare_environment(None)
    assert environ["RAY_grpc_enable_http_proxy"] == "0"
    assert {name: environ[name] for name in DEAD_PROXIES} == DEAD_PROXIES


@pytest.mark.usefixtures("behind_a_proxy")
def test_a_service_of_this_machine_is_not_asked_through_a_proxy() -> None:
    own = next(e.address for entries in psutil.net_if_addrs().values() for e in entries if e.family == socket.AF_INET)
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0", own, socket.gethostname()):
        assert is_here(host) and proxy_of(f"http://{host}:8000") is None, host
    assert is_here("::1") and proxy_of("http://[::1]:8000") is None
    for host in ("192.0.2.1", "models.example", "2001:db8::1"):
        assert not is_here(host), host
    assert proxy_of("http://models.example") == proxy_of("https://192.0.2.1") == DEAD


def proxy_of(url: str) -> str | None:
    """The proxy that an Endpoint asks for this URL."""
    with Endpoint(url) as endpoint:
        transport: Any = endpoint._client._transport_for_url(httpx.URL(url))
        proxy = getattr(transport._pool, "_proxy_url", None)
        return None if proxy is None else f"http://{proxy.host.decode()}:{proxy.port}"


def test_doctor_says_which_proxies_there_are_and_what_they_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *(name.upper() for name in PROXIES)):
        monkeypatch.delenv(name, raising=False)
    assert proxy_words({}) == "none in the environment"
    monkeypatch.setenv("HTTPS_PROXY", "http://joe:word@proxy.example:3128")
    monkeypatch.setenv("no_proxy", "localhost")
    assert read_facts().proxies == {"HTTPS_PROXY": "http://joe:(hidden)@proxy.example:3128", "no_proxy": "localhost"}
    words = proxy_words(read_facts().proxies)
    assert words.startswith("no_proxy=localhost, HTTPS_PROXY=http://joe:(hidden)@proxy.example:3128: downloads go")
