"""A client of the OpenAI API with streamed answers, for verbs such as `tandem chat` (on_endpoint).

It works with any OpenAI-compatible server. It blocks, and has one request at a time.
"""

import socket
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_address
from types import MappingProxyType, TracebackType
from typing import Any, Final

import httpx
import msgspec
import psutil

from tandem.cluster.gateway.http.tls import ClientFiles, client_context
from tandem.configs.errors import SettingsError, TandemError

CONNECT_S: Final = 5.0
SILENCE_S: Final = 300.0
"""The longest pause in an answer. A request may wait in the queue for as long."""
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
NEAR: Final = frozenset({"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"})
"""Names of the loopback."""


def is_here(host: str) -> bool:
    """Returns True for this machine's names and addresses, which no proxy of the environment is asked for. Names of
    others are not looked up: behind a proxy nobody may know them."""
    if host in NEAR or host == socket.gethostname():
        return True
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        return False
    own = (entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries)
    return address.is_loopback or str(address) in own


class EndpointError(TandemError):
    """A service that does not answer, or refuses a request. The message is for the user."""


class NotThere(EndpointError):
    """An answer of 404: what the request names is not there, or no longer."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Problem(msgspec.Struct, frozen=True):
    message: str = "it does not say why"


class _Event(msgspec.Struct, frozen=True):
    """The fields that are read of a completion chunk, a chat chunk or an error."""

    choices: list[_Choice] = []
    error: _Problem | None = None


class ListedModel(msgspec.Struct, frozen=True):
    """A model of a service's list. root: the model that it is made of, as vLLM and Tandem say."""

    id: str
    root: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[ListedModel]


class Endpoint:
    """A connection to the service at `url` (with or without /v1). Closed as a context manager. Every method raises
    EndpointError."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        certificate: str | None = None,
        files: ClientFiles = ClientFiles(),
    ) -> None:
        """certificate: of the service (PEM), to trust it alone under any name; None: what the machine trusts. files:
        the client's own certificate, and whom it trusts instead. SettingsError when `url` is not an HTTP URL, `api_key`
        cannot be sent, or files do not fit."""
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise SettingsError(f"{url!r} is not a URL: {error}", "--url") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise SettingsError(f"{url!r} must be like http://127.0.0.1:8000", "--url")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
            raise SettingsError("a key must be printable ASCII and not empty", "--api-key")
        files.check(parsed.scheme)
        self._has_key = api_key is not None
        self._may_lack_certificate = parsed.scheme == "https" and files.certfile is None
        self._client = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {api_key}"} if api_key is not None else {},
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S),
            trust_env=not is_here(parsed.host),
            verify=client_context(certificate, files) if parsed.scheme == "https" else True,
        )

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def first_model(self) -> str:
        """The first model name in the service's list."""
        return self.models()[0].id

    def models(self) -> list[ListedModel]:
        """The models that the service lists, at least one."""
        try:
            if listed := msgspec.json.decode(self.get("/v1/models"), type=_Models).data:
                return listed
        except msgspec.DecodeError as error:
            raise EndpointError(f"{self.url} lists no model; is it an OpenAI-compatible service?") from error
        raise EndpointError(f"{self.url} lists no model; is it an OpenAI-compatible service?")

    def get(self, route: str) -> bytes:
        """Returns the body of the answer to a GET."""
        try:
            answer = self._client.get(route)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        self._check(answer)
        return answer.content

    def post(self, route: str, body: Mapping[str, Any], more: Mapping[str, str] = NO_HEADERS) -> bytes:
        """Returns the body of the answer to a POST of a JSON object. more: headers. NotThere for a 404."""
        headers = {"content-type": "application/json", **more}
        try:
            answer = self._client.post(route, content=msgspec.json.encode(body), headers=headers)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        self._check(answer)
        return answer.content

    def stream(self, route: str, body: Mapping[str, Any]) -> Iterator[str]:
        """Yields the pieces of one answer's text as they come. Closing the iterator ends the request."""
        try:
            content = msgspec.json.encode({**body, "stream": True})
        except UnicodeEncodeError as error:
            raise EndpointError("the text is not valid UTF-8") from error
        headers = {"content-type": "application/json"}
        try:
            with self._client.stream("POST", route, content=content, headers=headers) as answer:
                if answer.status_code != 200:
                    answer.read()
                self._check(answer)
                yield from self._pieces(answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _pieces(self, answer: httpx.Response) -> Iterator[str]:
        for data in event_data(answer.iter_bytes()):
            if data == b"[DONE]":
                return
            try:
                event = msgspec.json.decode(data, type=_Event)
            except msgspec.DecodeError as error:
                raise EndpointError(f"{self.url} sent what is no chunk of an answer: {data[:80]!r}") from error
            if event.error is not None:
                raise EndpointError(f"the answer broke off: {event.error.message}")
            for choice in event.choices:
                if text := choice.text or choice.delta.content:
                    yield text
        raise EndpointError("the answer broke off: the connection was closed before its end")

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code == 200:
            return
        if answer.status_code == 401:
            advice = "the service does not accept this key" if self._has_key else "the service asks for a key"
            raise EndpointError(f"{self.url}: {advice}; give --api-key or set TANDEM_API_KEY")
        try:
            problem = msgspec.json.decode(answer.content, type=_Event).error or _Problem()
        except msgspec.DecodeError:
            problem = _Problem("is it an OpenAI-compatible service?")
        kind = NotThere if answer.status_code == 404 else EndpointError
        raise kind(f"{self.url} answered {answer.status_code}: {problem.message}")

    def _unreachable(self, error: httpx.HTTPError) -> EndpointError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return EndpointError(f"nothing answers on {self.url}: {error or 'no connection in time'}")
        if isinstance(error, httpx.TimeoutException):
            return EndpointError(f"{self.url} has been silent for {SILENCE_S:.0f} s")
        advice = "; if it asks for a client's certificate, give --ssl-certfile" if self._may_lack_certificate else ""
        return EndpointError(f"the connection to {self.url} broke: {error or type(error).__name__}{advice}")


def event_data(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the data of each server-sent event."""
    rest = b""
    for chunk in chunks:
        lines, rest = whole_lines(rest, chunk)
        yield from data_of(lines)


def whole_lines(rest: bytes, chunk: bytes) -> tuple[list[bytes], bytes]:
    """Returns the lines of a stream that are complete with a chunk, and the begin of the next. Only a line feed ends a
    line: JSON text may contain the other line breaks that httpx splits at."""
    *lines, rest = (rest + chunk).split(b"\n")
    return lines, rest


def data_of(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the data of events, of their lines."""
    for line in lines:
        if line.startswith(b"data:"):
            yield line[5:].strip()
