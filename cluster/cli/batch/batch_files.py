"""OpenAI batch files for `tandem run-batch`: reading the input, running its lines, reading an earlier output.

Every line goes through the gateway's ASGI application in this process, so its answer is the HTTP service's, errors
included. The output is appended to as answers come, and an interrupted run continues from it.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tandem.configs.errors import SettingsError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
ASGIApp = Callable[..., Any]


class BatchLine(NamedTuple):
    """One line of the input. problem: the reason why it cannot be sent, else None."""

    number: int
    custom_id: str | None
    url: str
    body: bytes
    problem: str | None

    @property
    def key(self) -> str:
        """A name that no other line has: the custom_id, else the problem, which contains the line number."""
        return self.custom_id if self.custom_id is not None else str(self.problem)


def read_lines(path: Path) -> list[BatchLine]:
    """Reads all lines of a batch file. SettingsError when it cannot be read or a custom_id comes twice."""
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
    """Parses one line: {"custom_id", "method", "url", "body"}. An error goes into `problem`."""
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


class Answered(NamedTuple):
    """BatchLine.key of the lines that an earlier run has answered for good, and of those among them that failed."""

    keys: frozenset[str]
    failed: frozenset[str]


def read_answered(path: Path) -> Answered:
    """Reads an output file. Removes rows that another try may answer (408, 429, 5xx) and a row that was cut off.
    SettingsError when the file is not an output of run-batch."""
    if not path.exists():
        return Answered(frozenset(), frozenset())
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
    return Answered(frozenset(keys), frozenset(key for key, fine in keys.items() if not fine))


def key_of(row: Mapping[str, Any]) -> str:
    """The BatchLine.key of the line that an output row answers."""
    return str(row["error"]["message"] if row["custom_id"] is None else row["custom_id"])


def succeeded(row: Mapping[str, Any]) -> bool:
    """Returns True for an output row with status 200."""
    return row["response"] is not None and row["response"]["status_code"] == 200


def is_final(row: Mapping[str, Any]) -> bool:
    """Returns True for a row that another try would not change: a success, or a line or request that is wrong."""
    status = 400 if row["response"] is None else row["response"]["status_code"]
    return status < 500 and status not in (408, 429)


def record(line: BatchLine, answer: httpx.Response | None) -> dict[str, Any]:
    """The output row of a line, in OpenAI's format, with the fields that were ignored. answer: None for a line that
    cannot be sent."""
    error = None
    response: dict[str, Any] | None = None
    if line.problem is not None or answer is None:
        error = {"code": "invalid_value", "message": line.problem}
    else:
        request_id = answer.headers.get("x-request-id", "")
        response = {"status_code": answer.status_code, "request_id": request_id, "body": answer.json()}
        if names := answer.headers.get("x-tandem-ignored"):
            response["ignored"] = names.split(", ")
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }


async def run_lines(app: ASGIApp, lines: list[BatchLine], at_once: int) -> AsyncIterator[dict[str, Any]]:
    """Yields output rows in the order in which lines finish. At most `at_once` requests are in flight."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", trust_env=False)
    free = asyncio.Semaphore(at_once)
    headers = {"content-type": "application/json"}

    async def one(line: BatchLine) -> dict[str, Any]:
        if line.problem is not None:
            return record(line, None)
        async with free:
            return record(line, await client.post(line.url, content=line.body, headers=headers))

    tasks = [asyncio.create_task(one(line)) for line in lines]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()
