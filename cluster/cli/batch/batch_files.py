"""OpenAI batch files for `tandem run-batch`: reading the input, running its lines, reading an earlier output.

Every line goes through the gateway's ASGI application in this process, so its answer is the HTTP service's, errors
included. The output is appended to as answers come, and an interrupted run continues from it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from tandem.cluster.gateway.batches.batch_lines import (
    BatchLine,
    CustomIds,
    LineAnswer,
    LineCutter,
    answer_row,
    parse_line,
    problem_row,
)
from tandem.configs.errors import SettingsError

ASGIApp = Callable[..., Any]
UNBOUNDED = 2**63
"""Bytes of a line: the gateway's own limit is that of its body."""


def read_lines(path: Path) -> list[BatchLine]:
    """Reads all lines of a batch file, which end with a line feed and with nothing else. To have the custom_id of an
    earlier line is a line's problem. SettingsError when the file cannot be read."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error}", "-i") from error
    cutter, ids = LineCutter(UNBOUNDED), CustomIds()
    given = [*cutter.feed(data), *cutter.end()]
    return [ids.checked(parse_line(number, line)) for number, line in given if line is not None]


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
        texts = [line for line in whole.split(b"\n") if line.strip()]
        rows = [json.loads(line) for line in texts]
        kept = [row for row in rows if succeeded(row)]
        finished = frozenset(str(row["custom_id"]) for row in kept)
    except (ValueError, LookupError, TypeError) as error:
        raise SettingsError(f"{path} exists and is not the output of run-batch", "-o") from error
    if len(whole) != len(data) or len(kept) != len(rows):
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(b"".join(text + b"\n" for text, row in zip(texts, rows, strict=True) if succeeded(row)))
        partial.replace(path)
    return finished


def succeeded(row: Mapping[str, Any]) -> bool:
    """Returns True for an output row with status 200."""
    return row["response"] is not None and row["response"]["status_code"] == 200


def in_order(path: Path, lines: list[BatchLine]) -> None:
    """Puts the rows of an output file into the order of the input. Rows without a custom_id, and those of lines whose
    custom_id an earlier one has, stand last, as they were written."""
    place: dict[str, int] = {}
    for line in lines:
        if line.custom_id is not None:
            place.setdefault(line.custom_id, line.number)
    rows = [text for text in path.read_bytes().split(b"\n") if text]
    seen: set[str] = set()

    def at(text: bytes) -> float:
        name = json.loads(text)["custom_id"]
        if name is None or name in seen:
            return float("inf")
        seen.add(name)
        return place.get(name, float("inf"))

    ordered = path.with_name(path.name + ".partial")
    ordered.write_bytes(b"".join(text + b"\n" for text in sorted(rows, key=at)))
    ordered.replace(path)


def _answer(response: httpx.Response) -> LineAnswer:
    names = response.headers.get("x-tandem-ignored")
    request_id = response.headers.get("x-request-id", "")
    return LineAnswer(response.status_code, request_id, response.content, tuple(names.split(", ")) if names else ())


async def run_lines(app: ASGIApp, lines: list[BatchLine], at_once: int) -> AsyncIterator[tuple[bytes, bool]]:
    """Yields output rows in the order in which lines finish, and whether each succeeded. At most `at_once` requests
    are in flight."""
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", trust_env=False)
    free = asyncio.Semaphore(at_once)
    headers = {"content-type": "application/json"}

    async def one(line: BatchLine) -> tuple[bytes, bool]:
        if line.problem is not None:
            return problem_row(line), False
        async with free:
            response = await client.post(line.url, content=line.body, headers=headers)
            return answer_row(line, _answer(response)), response.status_code == 200

    tasks = [asyncio.create_task(one(line)) for line in lines]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()
