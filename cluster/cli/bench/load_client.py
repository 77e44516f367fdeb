"""The client of a load: sends requests that were written before, and notes when the parts of their answers come.

It shares the machine with the service at times, so it does little: bodies are bytes, one connection pool, an event is
read into a few fields. aiohttp is what vLLM's bench uses too; a stream costs it a fraction of httpx's time.
"""

import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import Final

import aiohttp
import msgspec

from tandem.cluster.cli.bench.load_backends import LoadBackend
from tandem.cluster.cli.client.endpoint import data_of, whole_lines

LONGEST_S: Final = 6 * 60 * 60.0
CUT_OFF: Final = "the answer broke off: the connection was closed before its end"
NO_TOKEN: Final = "the answer ended without a token"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A request as it is sent. prompt_len: in tokens, as the sample says."""

    body: bytes
    headers: Mapping[str, str]
    prompt_len: int


@dataclass(slots=True)
class Outcome:
    """One request and what became of it. Times are in seconds: start_s of perf_counter when it was sent, ttft_s and
    latency_s from then to the first and the last token, itl_s between events with tokens, queue_s before it was sent,
    while the client let others go first. output_tokens: 0 until the service says. error: None if it was answered."""

    prompt_len: int
    start_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    queue_s: float = 0.0
    output_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    error: str | None = CUT_OFF

    @property
    def success(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class _Refusal(msgspec.Struct, frozen=True):
    message: str = ""


class _Refused(msgspec.Struct, frozen=True):
    error: _Refusal = _Refusal()


class LoadClient:
    """A pool of connections to one route; a context manager."""

    def __init__(
        self,
        url: str,
        backend: LoadBackend,
        tls: ssl.SSLContext | None,
        *,
        most: int | None,
        proxied: bool,
    ) -> None:
        """url: with the route. most: connections, None without a limit. proxied: a proxy of the environment is used."""
        self._url, self._backend = url, backend
        self._tls, self._most, self._proxied = tls, most, proxied

    async def __aenter__(self) -> "LoadClient":
        connector = aiohttp.TCPConnector(limit=self._most or 0, ssl=self._tls or True, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=LONGEST_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=self._proxied)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send(self, request: LoadRequest) -> Outcome:
        """Sends a request and reads its answer to the end. Whatever goes wrong is the outcome's `error`."""
        outcome = Outcome(request.prompt_len)
        outcome.start_s = perf_counter()
        try:
            async with self._session.post(self._url, data=request.body, headers=request.headers) as answer:
                if answer.status != 200:
                    outcome.error = f"{answer.status}: {_reason(await answer.read(), answer.reason)}"
                elif self._backend.streams:
                    await self._read_stream(answer, outcome)
                else:
                    await self._read_whole(answer, outcome)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            outcome.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        except msgspec.DecodeError as error:
            outcome.error = f"no event of an answer: {error}"
        return outcome

    async def _read_stream(self, answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
        read, last_s = self._backend.read, outcome.start_s
        async for data in answer_events(answer):
            if data == b"[DONE]":
                self._end(outcome)
                continue
            told = read(data)
            if told.has_tokens:
                now_s = perf_counter()
                if outcome.pieces:
                    outcome.itl_s.append(now_s - last_s)
                else:
                    outcome.ttft_s = now_s - outcome.start_s
                outcome.pieces.append(told.text)
                last_s, outcome.latency_s = now_s, now_s - outcome.start_s
            elif told.error is not None:
                outcome.error = f"the answer broke off: {told.error}"
                return
            else:
                outcome.prompt_len = told.prompt_tokens or outcome.prompt_len
                outcome.output_tokens = told.output_tokens or outcome.output_tokens
                if told.is_last:
                    self._end(outcome)

    async def _read_whole(self, answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
        told = self._backend.read(await answer.read())
        outcome.latency_s = perf_counter() - outcome.start_s
        outcome.prompt_len = told.prompt_tokens or outcome.prompt_len
        outcome.error = told.error

    @staticmethod
    def _end(outcome: Outcome) -> None:
        outcome.error = None if outcome.pieces else NO_TOKEN


async def answer_events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of each event of a streamed answer."""
    rest = b""
    async for chunk in answer.content.iter_any():
        lines, rest = whole_lines(rest, chunk)
        for data in data_of(lines):
            yield data


def _reason(body: bytes, otherwise: str | None) -> str:
    try:
        return msgspec.json.decode(body, type=_Refused).error.message or otherwise or ""
    except msgspec.DecodeError:
        return otherwise or body[:80].decode(errors="replace")
