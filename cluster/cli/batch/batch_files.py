"""OpenAI batch files for `tandem run-batch`: reading the input, running its lines, reading an earlier output.

Every line goes through the gateway's ASGI application in this process, so its answer is the HTTP service's, errors
included. The output is appended to as answers come, and an interrupted run continues from it.
"""

import asyncio
import codecs
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tandem.cluster.gateway.serving.json_body import parse_object
from tandem.configs.errors import SettingsError
from tandem.configs.schema import GatewaySettings
from tandem.workers.messages.errors import RequestRefused

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/score",
    "/v1/rerank",
    "/score",
    "/rerank",
    "/v2/rerank",
)
"""Routes that batches may ask for; one that this version's gateway does not have answers 404."""
ASGIApp = Callable[..., Any]
_MAX_DEPTH = GatewaySettings().max_json_depth + 1
"""The nesting of a line, which has a body in it."""


class BatchLine(NamedTuple):
    """One line of the input. problem: the reason why it cannot be sent, else None."""

    number: int
    custom_id: str | None
    url: str
    body: bytes
    problem: str | None


def read_lines(path: Path) -> list[BatchLine]:
    """Reads all lines of a batch file, which end with a line feed and with nothing else. To have the custom_id of an
    earlier line is a line's problem. SettingsError when the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error}", "-i") from error
    given = enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1)
    lines = [parse_line(number, line) for number, line in given if line.strip()]
    first: dict[str, int] = {}
    for at, line in enumerate(lines):
        if line.custom_id is not None and first.setdefault(line.custom_id, line.number) != line.number:
            problem = f"line {line.number}: custom_id {line.custom_id!r} is line {first[line.custom_id]}'s"
            lines[at] = line._replace(problem=problem)
    return lines


def parse_line(number: int, line: bytes) -> BatchLine:
    """Parses one line: {"custom_id", "method", "url", "body"}. An error goes into `problem`."""
    try:
        value = parse_object(line, _MAX_DEPTH)
    except RequestRefused as error:
        return BatchLine(number, None, "", b"", f"line {number} is not JSON as requests have it: {error}")
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


def lines_left(lines: list[BatchLine], finished: frozenset[str]) -> list[BatchLine]:
    """Returns the lines that have no answer yet. finished: read_finished()."""
    return [line for line in lines if line.problem is not None or line.custom_id not in finished]


def read_finished(path: Path) -> frozenset[str]:
    """Returns the custom_ids that an output file answers with 200. Removes all other rows from it, which are tried
    again, and a row that was cut off. SettingsError when the file is not an output of run-batch."""
    if not path.exists():
        return frozenset()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    try:
        rows = [json.loads(line) for line in whole.split(b"\n") if line.strip()]
        kept = [row for row in rows if succeeded(row)]
        finished = frozenset(str(row["custom_id"]) for row in kept)
    except (ValueError, LookupError, TypeError) as error:
        raise SettingsError(f"{path} exists and is not the output of run-batch", "-o") from error
    if len(whole) != len(data) or len(kept) != len(rows):
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(row_text(row) for row in kept), encoding="utf-8", newline="\n")
        partial.replace(path)
    return finished


def succeeded(row: Mapping[str, Any]) -> bool:
    """Returns True for an output row with status 200."""
    return row["response"] is not None and row["response"]["status_code"] == 200


def row_text(row: Mapping[str, Any]) -> str:
    """Returns an output row as one line. Half of a character, which only an escape can write, stays an escape."""
    text = json.dumps(row, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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
