"""Lines of OpenAI's batch files and of their answers: for /v1/batches, and for `tandem run-batch`.

A line is {"custom_id", "method", "url", "body"}; what is wrong with it is a problem of the line alone. A row of the
output is {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}.
"""

import codecs
import hashlib
import json
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from tandem.cluster.gateway.serving.json_body import parse_object
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused

ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
)
"""Routes that batches may ask for."""
OTHER_PATHS = ("/score", "/rerank", "/v2/rerank")
"""Further paths of the same routes, which `run-batch` takes too."""
LINE_OVERHEAD = 64 * 1024
"""Bytes that a line may have beside its body."""
_MAX_DEPTH = GatewaySettings().max_json_depth + 1
"""The nesting of a line, which has a body in it."""


class BatchLine(NamedTuple):
    """One line of the input. number: from 1. ignored: fields that were replaced. problem: the reason why it cannot be
    sent, else None."""

    number: int
    custom_id: str | None
    url: str
    body: bytes
    problem: str | None
    ignored: tuple[str, ...] = ()


class LineAnswer(NamedTuple):
    """The answer to a line. body: JSON. ignored: fields of the line's body that were."""

    status: int
    request_id: str
    body: bytes
    ignored: tuple[str, ...] = ()


Change = Callable[[dict[str, Any]], tuple[str, ...]]
"""Changes a line's body, and returns the fields that it has replaced."""


def parse_line(
    number: int, line: bytes, urls: Collection[str] = (*ENDPOINTS, *OTHER_PATHS), change: Change = lambda body: ()
) -> BatchLine:
    """Parses one line. An error goes into `problem`."""
    try:
        value = parse_object(line, _MAX_DEPTH)
    except RequestRefused as error:
        return BatchLine(number, None, "", b"", f"line {number} is not JSON as requests have it: {error}")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    problem = None
    if not isinstance(custom_id, str):
        custom_id, problem = None, f"line {number} has no custom_id"
    elif value.get("method", "POST") != "POST":
        problem = f"method {value['method']!r:.80} is not POST"
    elif url not in urls:
        problem = f"url {url!r:.80} is not {'one of ' if len(urls) > 1 else ''}{', '.join(urls)}"
    elif not isinstance(body, dict):
        problem = "body is not a JSON object"
    elif body.get("stream"):
        problem = "stream is not for batches"
    elif body.get("background"):
        problem = "background is not for batches"
    if problem is not None or not isinstance(body, dict):
        return BatchLine(number, custom_id, str(url), b"", problem)
    ignored = change(body)
    return BatchLine(number, custom_id, str(url), json.dumps(body).encode(), None, ignored)


class LineCutter:
    """Cuts a file that comes in pieces into lines, which end with a line feed and with nothing else. Empty lines are
    left out, and count. A line of more than max_bytes is None, and is never held."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._number = 0
        self._is_too_long = False

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes | None]]:
        """Yields the lines that end in a piece, each with its number from 1."""
        first, *more = piece.split(b"\n")
        self._hold(first)
        for part in more:
            yield from self._line()
            self._hold(part)

    def end(self) -> Iterator[tuple[int, bytes | None]]:
        """Yields the last line, if no line feed ends it."""
        yield from self._line()

    def _hold(self, part: bytes) -> None:
        if not self._is_too_long and len(self._held) + len(part) <= self._max_bytes:
            self._held += part
        elif part:
            self._is_too_long = True
            self._held.clear()

    def _line(self) -> Iterator[tuple[int, bytes | None]]:
        self._number += 1
        line = bytes(self._held)
        if self._number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if self._is_too_long:
            yield self._number, None
        elif line.strip():
            yield self._number, line
        self._held.clear()
        self._is_too_long = False


class CustomIds:
    """The custom_ids of a file so far, 16 bytes each."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}

    def checked(self, line: BatchLine) -> BatchLine:
        """The line; to have the custom_id of an earlier one is its problem. Called for each line in order."""
        if line.custom_id is None:
            return line
        digest = hashlib.blake2b(line.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = self._first.setdefault(digest, line.number)
        if first == line.number:
            return line
        problem = f"line {line.number}: custom_id {line.custom_id!r:.80} is line {first}'s"
        return line._replace(problem=problem)


def answer_row(line: BatchLine, answer: LineAnswer) -> bytes:
    """The output row of a line that was answered, without a line feed, with the fields that were ignored."""
    response: dict[str, Any] = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": msgspec.Raw(answer.body),
    }
    if names := sorted({*answer.ignored, *line.ignored}):
        response["ignored"] = names
    return _row(line, response, None)


def problem_row(line: BatchLine, code: str = "invalid_value", message: str | None = None) -> bytes:
    """The output row of a line that was not sent. message: why; None: its problem."""
    return _row(line, None, {"code": code, "message": line.problem if message is None else message})


def _row(line: BatchLine, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    row = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(row)
