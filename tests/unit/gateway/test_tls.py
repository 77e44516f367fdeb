"""TLS on the gateway's port: files that do not fit, handshakes, certificates of clients, the terminal's client."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tandem.cluster.cli.client.endpoint import Endpoint, EndpointError
from tandem.cluster.gateway.http.http_server import HttpLimits, make_server
from tandem.cluster.gateway.http.tls import client_context, read_certificate, server_context
from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings
from tests.support.certificates import Authority, Issued
from tests.unit.gateway.rig import COMPLETE, MINIMAL, gateway

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def issued(authority: Authority) -> Issued:
    return authority.issue("gateway.example")


def tls(issued: Issued, ca: str | None = None) -> GatewaySettings:
    return GatewaySettings(ssl_certfile=issued.certfile, ssl_keyfile=issued.keyfile, ssl_ca_certs=ca)


@contextlib.asynccontextmanager
async def serving(settings: GatewaySettings, **limits: float) -> AsyncIterator[tuple[str, str]]:
    """A gateway on a free port: its URL, its certificate."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.setblocking(False)
    async with gateway(settings=settings) as rig:
        context = server_context(settings)
        server = make_server(rig.app, shutdown_timeout_s=2, limits=HttpLimits(**limits), tls=context)  # type: ignore[arg-type]
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}", read_certificate(settings) or ""
        finally:
            server.should_exit = True
            await asyncio.wait_for(running, DEADLINE_S)
            listener.close()


def refused(settings: GatewaySettings) -> tuple[str | None, str]:
    with pytest.raises(SettingsError) as caught:
        server_context(settings)
    return caught.value.flag, str(caught.value)


def test_without_a_certificate_there_is_no_tls() -> None:
    assert server_context(GatewaySettings()) is None and read_certificate(GatewaySettings()) is None


def test_files_that_do_not_fit_are_refused_by_flag_and_name(
    authority: Authority, issued: Issued, tmp_path: Path
) -> None:
    missing, words = str(tmp_path / "none.pem"), tmp_path / "words.pem"
    words.write_text("no certificate")
    other, locked = authority.issue("other.example"), authority.issue("locked.example", b"word")
    for certfile, keyfile, ca, flag, why in (
        (missing, issued.keyfile, None, "--ssl-certfile", "none.pem cannot be read: No such file"),
        (issued.certfile, missing, None, "--ssl-keyfile", "none.pem cannot be read: No such file"),
        (issued.certfile, issued.keyfile, missing, "--ssl-ca-certs", "none.pem cannot be read: No such file"),
        (str(words), issued.keyfile, None, "--ssl-certfile", "words.pem holds no certificate"),
        (issued.certfile, str(words), None, "--ssl-keyfile", "words.pem holds no private key"),
        (issued.certfile, issued.keyfile, str(words), "--ssl-ca-certs", "words.pem holds no certificate"),
        (issued.certfile, other.keyfile, None, "--ssl-keyfile", "other.example.key is not the key of the certificate"),
        (locked.certfile, locked.keyfile, None, "--ssl-keyfile", "locked.example.key is encrypted"),
        (issued.certfile, None, None, "--ssl-certfile", "gateway.example.pem holds no private key"),
    ):
        found = refused(GatewaySettings(ssl_certfile=certfile, ssl_keyfile=keyfile, ssl_ca_certs=ca))
        assert found[0] == flag and why in found[1], found


def test_a_file_may_hold_certificate_and_key(issued: Issued, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(issued.certfile).read_text() + Path(issued.keyfile).read_text())
    settings = GatewaySettings(ssl_certfile=str(both))
    assert server_context(settings) is not None
    assert "PRIVATE" not in (read_certificate(settings) or ""), "what other commands get is public"


async def test_a_client_that_knows_the_certificate_gets_answers_and_streams(issued: Issued) -> None:
    async with serving(tls(issued)) as (url, certificate):
        async with httpx.AsyncClient(verify=client_context(certificate), base_url=url) as client:
            for stream in (False, True):
                body = {**MINIMAL[COMPLETE], "max_tokens": 3, "stream": stream}
                answer = await client.post(COMPLETE, json=body, headers={"origin": url})
                assert answer.status_code == 200, "its own pages speak https"
                assert not stream or answer.text.endswith("data: [DONE]\n\n")


async def test_who_does_not_know_the_certificate_or_speaks_plain_http_gets_nothing(issued: Issued) -> None:
    async with serving(tls(issued)) as (url, _):
        async with httpx.AsyncClient(verify=client_context(None), base_url=url) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/livez")
        async with httpx.AsyncClient(base_url=url.replace("https", "http")) as client:
            with pytest.raises(httpx.TransportError):
                await client.get("/livez")


async def test_another_certificate_of_the_same_authority_is_not_the_services(
    authority: Authority, issued: Issued
) -> None:
    other = read_certificate(tls(authority.issue("impostor.example"))) or ""
    async with serving(tls(issued)) as (url, _):
        async with httpx.AsyncClient(verify=client_context(other), base_url=url) as client:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/livez")


async def test_with_ca_certs_a_client_needs_a_certificate(authority: Authority, issued: Issued, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").issue("client")
    async with serving(tls(issued, authority.certfile)) as (url, certificate):
        for client_files, passes in ((None, False), (stranger, False), (authority.issue("client"), True)):
            context = client_context(certificate)
            if client_files is not None:
                context.load_cert_chain(client_files.certfile, client_files.keyfile)
            async with httpx.AsyncClient(verify=context, base_url=url) as client:
                if passes:
                    assert (await client.get("/livez")).status_code == 200
                else:
                    with pytest.raises((httpx.TransportError, ssl.SSLError)):
                        await client.get("/livez")


async def test_a_handshake_that_does_not_come_ends_the_connection(issued: Issued) -> None:
    async with serving(tls(issued), head_s=0.2) as (url, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
        writer.close()


async def test_the_terminals_client_talks_to_it(issued: Issued) -> None:
    async with serving(tls(issued)) as (url, certificate):

        def models(known: str | None) -> str:
            with Endpoint(url, None, known) as endpoint:
                return endpoint.first_model()

        assert await asyncio.to_thread(models, certificate) == "echo"
        with pytest.raises(EndpointError, match="nothing answers on https://"):
            await asyncio.to_thread(models, None)
