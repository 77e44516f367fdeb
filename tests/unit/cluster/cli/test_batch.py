"""run-batch: lines in, lines out, resumed after a cut; on the demo model, once through the real command."""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.cli.batch.batch_files import in_order, lines_left, read_finished, read_lines
from tandem.cluster.cli.verbs.run_batch import NOT_OFFLINE, run_batch
from tandem.cluster.gateway.batches.batch_lines import LineAnswer, answer_row, parse_line
from tandem.configs.errors import SettingsError
from tandem.configs.options import OPTIONS
from tests.support.verbs import run_verb_here

TANDEM = str(Path(sys.executable).parent / "tandem")


def chat_line(custom_id: str, text: str, **fields: Any) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def command(source: Path, target: Path, *more: str) -> list[str]:
    return ["run-batch", "demo", "-i", str(source), "-o", str(target), *more]


def run(source: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return run_verb_here(*command(source, target, *more))


def run_as_process(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    words = [TANDEM, *command(source, target)]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL)


def test_answers_errors_and_resumption(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [chat_line("sum", "What is 2 + 3?"), chat_line("bad", "hi", temperature=-1), "not json"]
    source.write_text("\n".join(lines))
    first = run_as_process(source, target)
    assert first.returncode == 1, first.stderr
    rows = {row["custom_id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert "5" in rows["sum"]["response"]["body"]["choices"][0]["message"]["content"]
    assert rows["bad"]["response"]["status_code"] == 400
    assert rows["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert "line 3" in rows[None]["error"]["message"]

    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    more = [chat_line("more", "Count from 3 to 9."), chat_line("auto", "hi", tools=[tool], max_tokens=2)]
    more.append(json.dumps({"custom_id": "r", "url": "/v1/responses", "body": {"model": "demo", "input": "Hi"}}))
    source.write_text("\n".join([*lines, *more]))
    target.write_bytes(target.read_bytes() + b'{"custom_id": "more", "resp')  # a run that was cut off while writing
    second = run(source, target, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    assert second.returncode == 1, second.stderr  # two lines fail again
    assert "5 requests run, 1 done before, 2 failed" in second.stderr
    answers = {row["custom_id"]: row["response"] for row in map(json.loads, target.read_text().splitlines())}
    assert len(target.read_text().splitlines()) == len(answers) == 6
    assert answers["more"]["body"]["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9"
    assert [answers[name]["status_code"] for name in ("sum", "bad", "auto", "r")] == [200, 400, 200, 200]
    assert list(answers) == ["sum", "bad", "more", "auto", "r", None], "in the order of the input"


def test_a_row_names_what_was_ignored() -> None:
    line = parse_line(1, chat_line("a", "hi").encode())
    for names in ((), ("messages[].id", "store")):
        row = json.loads(answer_row(line, LineAnswer(200, "r", b'{"a": "\\ud83d"}', names)))
        assert row["response"].get("ignored") == (list(names) or None)
        assert row["response"]["body"] == {"a": "\ud83d"}, "half of a character, which only an escape can write"


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
        ("[]", "must be a JSON object"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"n": 1, "n": 2}}', "comes twice"),
        ('{"custom_id": "\\ud83d", "url": "/v1/completions", "body": {}}', "surrogate"),
        ("{}", "custom_id"),
        ('{"custom_id": "a", "url": "/x", "body": {}}', "url '/x'"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "'GET'"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": 3}', "body"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "stream"),
    ],
)
def test_what_is_wrong_with_a_line_is_said(line: str, says: str) -> None:
    problem = parse_line(7, line.encode()).problem
    assert problem is not None and says in problem


def test_lines_end_at_line_feeds_only(tmp_path: Path) -> None:
    """JSON text may hold U+2028, U+2029, U+0085 and others at which str.splitlines() cuts."""
    path, odd = tmp_path / "in.jsonl", "one\u2028two\u2029three\u0085four"
    text = json.dumps({"custom_id": odd, "url": "/v1/completions", "body": {"prompt": odd}}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{text}\r\n\n{text.replace('four', 'five')}".encode() + b'\n{"\xff": 1}\n')
    first, second, third = read_lines(path)
    assert (first.custom_id, first.problem, json.loads(first.body)) == (odd, None, {"prompt": odd})
    assert second.problem is None and "line 4 is not JSON" in str(third.problem)
    done = tmp_path / "out.jsonl"
    row = {"custom_id": odd, "response": {"status_code": 200}, "error": None}
    done.write_text(json.dumps(row, ensure_ascii=False) + "\n" + '{"custom_id": "cut', encoding="utf-8", newline="\n")
    assert read_finished(done) == {odd}
    assert lines_left([first, second, third], read_finished(done)) == [second, third]


def test_a_custom_id_that_comes_twice_fails_its_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([chat_line("a", "x"), chat_line("a", "y"), chat_line("b", "z")]))
    first, second, third = read_lines(path)
    assert (first.problem, third.problem) == (None, None)
    assert second.problem == "line 2: custom_id 'a' is line 1's" and second.custom_id == "a"
    assert lines_left([first, second, third], frozenset(("a",))) == [second, third], "it is said again in each run"


def test_deep_nesting_is_a_problem_of_its_line() -> None:
    assert "is not JSON" in str(parse_line(1, b"[" * 100_000).problem)


def test_no_output_yet_means_nothing_is_finished(tmp_path: Path) -> None:
    assert read_finished(tmp_path / "out") == frozenset()


def test_only_rows_that_succeeded_stay(tmp_path: Path) -> None:
    path = tmp_path / "out"
    answers = {"fine": 200, "wrong": 400, "busy": 429, "broken": 500}
    rows: list[Any] = [{"custom_id": key, "response": {"status_code": answers[key]}, "error": None} for key in answers]
    rows.append({"custom_id": "fine", "response": None, "error": {"code": "invalid_value", "message": "twice"}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_finished(path) == {"fine"}
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["fine"]


def test_rows_stand_in_the_order_of_the_input(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([chat_line("a", "x"), "not json", chat_line("a", "y"), chat_line("b", "z")]))
    rows = [("b", 200), (None, 0), ("a", 200), ("of an earlier input", 200), ("a", 0)]
    target.write_text("".join(json.dumps({"custom_id": name, "n": n}) + "\n" for name, n in rows))
    in_order(target, read_lines(source))
    found = [(row["custom_id"], row["n"]) for row in map(json.loads, target.read_text().splitlines())]
    assert found == [("a", 200), ("b", 200), (None, 0), ("of an earlier input", 200), ("a", 0)]


def test_every_flag_that_changes_answers_is_taken() -> None:
    """All that `serve` has but what is about ports, keys, stores and groups; each of those by its name."""
    assert {option.name for option in OPTIONS} >= NOT_OFFLINE
    named = {"enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "chat_template", "generation_config"}
    named |= {"override_generation_config", "hf_overrides", "max_logprobs", "pooler_config", "speculative_config"}
    assert named <= {option.name for option in OPTIONS} - NOT_OFFLINE
    parameters = inspect.signature(run_batch).parameters
    assert {option.name for option in OPTIONS} - NOT_OFFLINE <= parameters.keys()


def test_a_file_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes\n")
    with pytest.raises(SettingsError, match=r"notes\.txt"):
        read_finished(path)
    assert path.read_text() == "my notes\n"


def test_more_prompts_than_any_queue_holds(tmp_path: Path) -> None:
    body = {"model": "demo", "prompt": ["Once upon a time"] * 10, "max_tokens": 1}
    lines = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body} for n in range(150)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    done = run(source, target)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(target.read_text().splitlines()) == 150
