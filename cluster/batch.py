"""Offline serving of OpenAI batch files: every line goes through the gateway's own application, in this process.

Called by `tandem run-batch`. A line's answer is what the HTTP service would have sent, errors included. Results are
appended as they come, so a run that was cut off continues where it stopped. Opens no port and starts no Ray.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from configs.errors import SettingsError

URLS = ("/v1/chat/completions", "/v1/completions")
Message = MutableMapping[str, Any]
ASGIApp = Callable[..., Any]


class BatchLine(NamedTuple):
    """One line of the input: `problem` says why it cannot be sent."""

    number: int
    custom_id: str | None
    url: str
    body: bytes
    problem: str | None

    @property
    def key(self) -> str:
        """What tells this line from the others: its custom_id, or what is wrong with it (that names the line)."""
        return self.custom_id if self.custom_id is not None else str(self.problem)


class Answer(NamedTuple):
    """Status, x-request-id and body of one answer."""

    status: int
    request_id: str
    body: bytes


def read_lines(path: Path) -> list[BatchLine]:
    """All lines of a batch file. SettingsError when it cannot be read or a custom_id comes twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}", "-i") from error
    lines = [parse_line(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    seen: dict[str, int] = {}
    for line in lines:
        if line.custom_id is not None:
            first = seen.setdefault(line.custom_id, line.number)
            if first != line.number:
                raise SettingsError(
                    f"{path}: custom_id {line.custom_id!r} on line {line.number} is line {first}'s", "-i"
                )
    return lines


def parse_line(number: int, text: str) -> BatchLine:
    """One line: {"custom_id", "method", "url", "body"}; what is wrong with it goes into `problem`."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return BatchLine(number, None, "", b"", f"line {number} is not JSON: {error}")
    if not isinstance(value, dict):
        return BatchLine(number, None, "", b"", f"line {number} is not a JSON object")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    problem = None
    if not isinstance(custom_id, str):
        custom_id, problem = None, f"line {number} has no custom_id"
    elif value.get("method", "POST") != "POST":
        problem = f"method {value['method']!r} is not POST"
    elif url not in URLS:
        problem = f"url {url!r} is not one of {', '.join(URLS)}"
    elif not isinstance(body, dict):
        problem = "body is not a JSON object"
    elif body.get("stream"):
        problem = "stream is not for batches"
    return BatchLine(number, custom_id, str(url), json.dumps(body).encode(), problem)


class Earlier(NamedTuple):
    """What a run that was cut off has left: keys of the lines that need no second try, and of those that failed."""

    keys: frozenset[str]
    failed: frozenset[str]


def take_up(path: Path) -> Earlier:
    """Reads an output file; takes out rows that a second try may mend (429, 5xx) and a row that was cut off."""
    if not path.exists():
        return Earlier(frozenset(), frozenset())
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        kept = [row for row in rows if is_final(row)]
        keys = {key_of(row): succeeded(row) for row in kept}
    except (ValueError, LookupError, TypeError) as error:
        raise SettingsError(f"{path} exists and is not the output of run-batch", "-o") from error
    if len(whole) != len(data) or len(kept) != len(rows):
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in kept), encoding="utf-8")
        partial.replace(path)
    return Earlier(frozenset(keys), frozenset(key for key, fine in keys.items() if not fine))


def key_of(row: Mapping[str, Any]) -> str:
    """BatchLine.key of the line that a row answers."""
    return str(row["error"]["message"] if row["custom_id"] is None else row["custom_id"])


def succeeded(row: Mapping[str, Any]) -> bool:
    return row["response"] is not None and row["response"]["status_code"] == 200


def is_final(row: Mapping[str, Any]) -> bool:
    """Would the same line fail again? Successes, lines that cannot be sent, and refusals for what they say."""
    status = 400 if row["response"] is None else row["response"]["status_code"]
    return status < 500 and status not in (408, 429)


async def post(app: ASGIApp, url: str, body: bytes) -> Answer:
    """One POST to an ASGI application, without a socket."""
    sent = False
    answer: dict[str, Any] = {"status": 500, "headers": []}
    chunks: list[bytes] = []
    gone = asyncio.Event()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await gone.wait()
            return {"type": "http.disconnect"}
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.update(message)
        else:
            chunks.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
    }  # fmt: skip
    await app(scope, receive, send)
    found = {bytes(k).lower(): bytes(v).decode("latin-1") for k, v in answer["headers"]}
    return Answer(answer["status"], found.get(b"x-request-id", ""), b"".join(chunks))


def record(line: BatchLine, answer: Answer | None) -> dict[str, Any]:
    """One line of the output file, in OpenAI's form."""
    error = None
    response = None
    if line.problem is not None or answer is None:
        error = {"code": "invalid_value", "message": line.problem}
    else:
        body = json.loads(answer.body)
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


async def run_lines(app: ASGIApp, lines: list[BatchLine], at_once: int) -> AsyncIterator[dict[str, Any]]:
    """Output records in the order in which lines finish; at most `at_once` are in the engine."""
    places = asyncio.Semaphore(at_once)

    async def one(line: BatchLine) -> dict[str, Any]:
        if line.problem is not None:
            return record(line, None)
        async with places:
            return record(line, await post(app, line.url, line.body))

    tasks = [asyncio.create_task(one(line)) for line in lines]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
