"""docs/offline.md: its Python examples and its batch lines are run as they stand."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.verbs import run_verb_here

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "offline.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
LINES = re.findall(r'^    (\{"custom_id".*\})$', PAGE, re.MULTILINE)
COMMANDS = re.findall(r"^    \.venv/bin/tandem (run-batch .*)$", PAGE, re.MULTILINE)


def run(command: list[str], folder: Path) -> str:
    """Its standard output."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd=folder, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def lines_of(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line]


Answers = Callable[[str], list[str]]
RunBatch = Callable[[str, str], str]


@pytest.fixture
def answers_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answers:
    """Example to the lines that it prints, run as the main module of this process in the project's folder."""
    monkeypatch.chdir(ROOT)

    def answers(example: str) -> list[str]:
        script = tmp_path / "example.py"
        script.write_text(example)
        capsys.readouterr()
        runpy.run_path(str(script), run_name="__main__")
        return lines_of(capsys.readouterr().out)

    return answers


@pytest.fixture
def run_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunBatch:
    """What a command writes when its input is a line, in a folder with links to what it names. (test_batch.py has
    processes of their own.)"""
    monkeypatch.chdir(tmp_path)

    def written(command: str, line: str) -> str:
        words = command.split()
        Path(words[words.index("-i") + 1]).write_text(line + "\n")
        Path("configs").symlink_to(ROOT / "configs")
        done = run_verb_here(*words)
        assert done.returncode == 0, done.stderr
        return Path(words[words.index("-o") + 1]).read_text()

    return written


def test_the_page_holds_what_is_run_here() -> None:
    assert (len(EXAMPLES), len(LINES), len(COMMANDS)) == (12, 3, 2)


def test_the_python_example_answers(tmp_path: Path) -> None:
    """In a process of its own, whose ranks load the script again."""
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[0])
    printed = run([sys.executable, str(script)], tmp_path)
    assert lines_of(printed) == [f"{n} + 4 = {n + 4}" for n in range(5)]


def test_the_example_with_forbidden_and_allowed_tokens_obeys_them(answers_of: Answers) -> None:
    without, only = answers_of(EXAMPLES[2])
    assert without.startswith("3, 4, 5") and "6" not in without
    assert only and set(only) <= set("123")


def test_the_example_with_log_probabilities_shows_the_best_tokens(answers_of: Answers) -> None:
    lines = answers_of(EXAMPLES[3])
    assert len(lines) == 4 and all(" is number 1 of " in line and line.count(", ") >= 1 for line in lines)


def test_the_example_with_errors_tells_those_of_prompts_from_those_of_calls(answers_of: Answers) -> None:
    once, long, cat, construction, call = answers_of(EXAMPLES[4])
    assert (once, cat) == ("ended with length", "ended with length")
    assert long.startswith("failed: ") and "256" in long
    assert construction == "nothing ran: temperature=9: Expected `float` <= 2.0"
    assert call == "nothing ran: logprobs=99 exceeds the limit of 20 (max_logprobs)"


def test_the_examples_with_threads_and_with_a_loop_say_the_same(answers_of: Answers) -> None:
    threads, loop = answers_of(EXAMPLES[5]), answers_of(EXAMPLES[6])
    assert len(threads) == 4 and len(loop) == 2 and loop[1].strip() == "2 + 3 = 5"


def test_the_example_of_structured_output_prints_texts_of_its_forms(answers_of: Answers) -> None:
    person, colour = answers_of(EXAMPLES[7])
    assert json.loads(person).keys() == {"name", "age"} and colour in ("red", "green")


def test_the_three_ways_to_write_a_prompt_are_one(answers_of: Answers) -> None:
    answers = answers_of(EXAMPLES[1])
    assert len(answers) == 3 and len(set(answers)) == 1


def test_the_example_of_beam_search_prints_the_beams_best_first(answers_of: Answers) -> None:
    lines = answers_of(EXAMPLES[10])
    beams = [(score, text[1:]) for score, text in (line.split(" ", 1) for line in lines)]
    assert [text.startswith("Once upon a time") for _, text in beams] == [True] * 3 + [False] * 3
    assert [text.startswith("The cat") for _, text in beams] == [False] * 3 + [True] * 3
    assert len({text for _, text in beams}) == 6 and all(float(score) < 0 for score, _ in beams)


def test_the_batch_command_and_line_work(run_batch: RunBatch) -> None:
    assert "2 + 3 = 5" in run_batch(COMMANDS[0], LINES[1])


def test_the_examples_with_embeddings_and_scores_find_the_question_that_is_nearer(answers_of: Answers) -> None:
    near, far = map(float, answers_of(EXAMPLES[8]))
    assert far + 0.1 < near < 1
    assert list(map(float, answers_of(EXAMPLES[9]))) == pytest.approx([near, far], abs=0.011), "the same pairs"


def test_the_batch_line_with_embeddings_works(run_batch: RunBatch) -> None:
    answer = json.loads(run_batch(COMMANDS[0], LINES[0]))["response"]["body"]
    assert [(item["index"], len(item["embedding"]) > 64) for item in answer["data"]] == [(0, True), (1, True)]


def test_the_example_with_adapters_answers_three_times(answers_of: Answers) -> None:
    plain, pirate, shout = answers_of(EXAMPLES[11])
    assert not plain.startswith("Arr!") and pirate.startswith("Arr!") and shout == shout.upper()


def test_the_batch_command_with_an_adapter_and_its_line_work(run_batch: RunBatch) -> None:
    assert "Arr!" in run_batch(COMMANDS[1], LINES[2])
