"""TLS on the gateway's port: files that do not fit, handshakes, certificates of clients, the terminal's client."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tandem.cluster.cli.client.endpoint import Endpoint, EndpointError
from tandem.cluster.gateway.http.http_server import HttpLimits, make_server
from tandem.cluster.gateway.http.tls import ClientFiles, client_context, read_certificate, server_context
from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings
from tests.support.certificates import Authority, Issued
from tests.support.verbs import invoked
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


@pytest.mark.parametrize(("required", "bare", "strange"), [(0, True, True), (1, True, False), (2, False, False)])
async def test_whether_clients_need_a_certificate_is_a_setting(
    authority: Authority, issued: Issued, tmp_path: Path, required: int, bare: bool, strange: bool
) -> None:
    stranger = Authority(tmp_path, "stranger").issue("client")
    settings = msgspec.structs.replace(tls(issued, authority.certfile), ssl_cert_reqs=required)
    async with serving(settings) as (url, certificate):
        for files, passes in (
            (ClientFiles(), bare),
            (ClientFiles(stranger.certfile, stranger.keyfile), strange),
            (ClientFiles(*own(authority)), True),
        ):
            context = client_context(certificate, files)
            async with httpx.AsyncClient(verify=context, base_url=url) as client:
                if passes:
                    assert (await client.get("/livez")).status_code == 200
                else:
                    with pytest.raises((httpx.TransportError, ssl.SSLError)):
                        await client.get("/livez")


def own(authority: Authority) -> tuple[str, str]:
    """A client's certificate and its key."""
    issued = authority.issue("client")
    return issued.certfile, issued.keyfile


async def test_the_terminals_client_shows_its_certificate_and_trusts_authorities(
    authority: Authority, issued: Issued, tmp_path: Path
) -> None:
    async with serving(tls(issued, authority.certfile)) as (url, certificate):

        def models(known: str | None, *files: str) -> str:
            with Endpoint(url, None, known, ClientFiles(*files)) as endpoint:
                return endpoint.first_model()

        mine = own(authority)
        assert await asyncio.to_thread(models, certificate, *mine) == "echo"
        with pytest.raises(EndpointError, match="give --ssl-certfile"):
            await asyncio.to_thread(models, certificate)
        with pytest.raises(EndpointError, match="IP address mismatch"):
            await asyncio.to_thread(models, certificate, *mine, authority.certfile)
    named = authority.issue("named.example", address="127.0.0.1")
    async with serving(tls(named, authority.certfile)) as (url, _):
        assert await asyncio.to_thread(models, None, *mine, authority.certfile) == "echo"
        with pytest.raises(EndpointError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(models, None, *mine, Authority(tmp_path, "other").certfile)


async def test_complete_shows_the_certificate_that_its_flags_name(authority: Authority) -> None:
    named, mine = authority.issue("named.example", address="127.0.0.1"), authority.issue("client")
    flags = ["--ssl-certfile", mine.certfile, "--ssl-keyfile", mine.keyfile, "--ssl-ca-certs", authority.certfile]
    async with serving(tls(named, authority.certfile)) as (url, _):
        command = ["complete", "Once", "--url", url, "--max-tokens", "4", "--temperature", "0"]
        done = await asyncio.to_thread(invoked, [*command, *flags])
        assert (done.exit_code, done.stdout) == (0, "Onc\n")
        done = await asyncio.to_thread(invoked, [*command, *flags[4:]])
        assert isinstance(done.exception, EndpointError)


def test_a_clients_files_that_do_not_fit_are_refused_by_flag(authority: Authority, issued: Issued) -> None:
    for url, files, flag, why in (
        ("http://x", ClientFiles(issued.certfile), "--ssl-certfile", "plain HTTP"),
        ("http://x", ClientFiles(None, None, authority.certfile), "--ssl-ca-certs", "plain HTTP"),
        ("https://x", ClientFiles(None, issued.keyfile), "--ssl-keyfile", "needs --ssl-certfile"),
        ("https://x", ClientFiles(issued.certfile, "none.pem"), "--ssl-keyfile", "none.pem cannot be read"),
        ("https://x", ClientFiles(None, None, issued.keyfile), "--ssl-ca-certs", "holds no certificate"),
    ):
        with pytest.raises(SettingsError) as caught:
            Endpoint(url, None, None, files)
        assert caught.value.flag == flag and why in str(caught.value)


async def test_the_terminals_client_talks_to_it(issued: Issued) -> None:
    async with serving(tls(issued)) as (url, certificate):

        def models(known: str | None) -> str:
            with Endpoint(url, None, known) as endpoint:
                return endpoint.first_model()

        assert await asyncio.to_thread(models, certificate) == "echo"
        with pytest.raises(EndpointError, match="nothing answers on https://"):
            await asyncio.to_thread(models, None)
