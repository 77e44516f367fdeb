"""run-batch: lines in, lines out, resumed after a cut; on the demo model through the real command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cluster.cli.batch.batch_files import parse_line, read_answered, read_lines, record
from tandem.configs.errors import SettingsError

TANDEM = str(Path(sys.executable).parent / "tandem")


def chat_line(custom_id: str, text: str, **fields: Any) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def run(source: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [TANDEM, "run-batch", "demo", "-i", str(source), "-o", str(target), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)


def test_answers_errors_and_resumption(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [chat_line("sum", "What is 2 + 3?"), chat_line("bad", "hi", temperature=-1), "not json"]
    source.write_text("\n".join(lines))
    first = run(source, target)
    assert first.returncode == 1, first.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert "5" in rows["sum"]["response"]["body"]["choices"][0]["message"]["content"]
    assert rows["bad"]["response"]["status_code"] == 400
    assert rows["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert "line 3" in rows[None]["error"]["message"]

    source.write_text("\n".join([*lines, chat_line("more", "Count from 3 to 9.")]))
    target.write_bytes(target.read_bytes() + b'{"custom_id": "more", "resp')  # a run that was cut off while writing
    second = run(source, target)
    assert second.returncode == 1, second.stderr  # two lines have failed for good
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["custom_id"] for row in rows].count("sum") == 1 and len(rows) == 4
    assert rows[-1]["response"]["body"]["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"


def test_a_row_names_what_was_ignored() -> None:
    line = parse_line(1, chat_line("a", "hi"))
    for headers, ignored in (({}, None), ({"x-tandem-ignored": "store, messages[].id"}, ["store", "messages[].id"])):
        row = record(line, httpx.Response(200, json={}, headers=headers))
        assert row["response"].get("ignored") == ignored


@pytest.mark.parametrize("flag", ["--port", "--redis-url", "--data-parallel-size"])
def test_flags_of_the_service_are_refused(tmp_path: Path, flag: str) -> None:
    done = run(tmp_path / "in", tmp_path / "out", flag, "2")
    assert done.returncode == 2 and flag in done.stderr


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    done = run(tmp_path / "absent.jsonl", tmp_path / "out")
    assert done.returncode == 2 and "absent.jsonl" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[]", "not a JSON object"),
        ("{}", "custom_id"),
        ('{"custom_id": "a", "url": "/x", "body": {}}', "url '/x'"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "'GET'"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 3}', "body"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "stream"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line: str, says: str) -> None:
    problem = parse_line(7, line).problem
    assert problem is not None and says in problem


def test_a_custom_id_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([chat_line("a", "x"), chat_line("a", "y")]))
    with pytest.raises(SettingsError, match="line 2"):
        read_lines(path)


def test_no_output_yet_means_nothing_is_finished(tmp_path: Path) -> None:
    assert read_answered(tmp_path / "out").keys == frozenset()


def test_rows_that_may_succeed_later_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "out"
    answers = {"fine": 200, "never": 400, "busy": 429, "broken": 500}
    rows = [{"custom_id": key, "response": {"status_code": answers[key]}, "error": None} for key in answers]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    earlier = read_answered(path)
    assert earlier.keys == {"fine", "never"} and earlier.failed == {"never"}
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["fine", "never"]


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(SettingsError, match=r"notes\.txt"):
        read_answered(path)
    assert path.read_text() == "my notes\n"


def test_more_prompts_than_any_queue_holds(tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": ["Once upon a time"] * 10, "max_tokens": 1}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(150)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    done = run(source, target)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(target.read_text().splitlines()) == 150
