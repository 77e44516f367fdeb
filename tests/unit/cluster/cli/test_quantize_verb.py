"""`tandem quantize`: the page's commands as they stand, its table, and what it refuses, by flag and value."""

import errno
import json
import re
from pathlib import Path

import pytest

from tandem.workers.quantize import packed_checkpoint
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tests.support.verbs import run_verb_here

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs/serving/quantized.md").read_text().partition("## Quantize a model")[2].partition("\n## ")[0]
COMMANDS = [line.split(" #")[0].split() for line in re.findall(r"^    \.venv/bin/tandem (.* /tmp/.*)$", PAGE, re.M)]
TEXT = str(ROOT / "docs" / "tour.md")
ONE = {"quantize": ("--cpu-threads", "1"), "plan": ()}
SMALL = ("--calib", TEXT, "--calib-tokens", "64", "--calib-length", "32", "--cpu-threads", "1", "--method", "rtn")


def run(*arguments: str) -> str:
    """What it says on standard error where it refuses."""
    done = run_verb_here("quantize", *arguments)
    assert done.returncode == 2 and not done.stdout, done
    return done.stderr


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert [command[0] for command in COMMANDS] == ["quantize", "serve"]
    for command in (COMMANDS[0], ["plan", *COMMANDS[1][1:]]):
        done = run_verb_here(*[word.replace("/tmp", str(tmp_path)) for word in command], *ONE[command[0]])
        assert done.returncode == 0 and done.stdout, done.stderr
    again = run_verb_here(*[word.replace("/tmp", str(tmp_path)) for word in COMMANDS[0]], "--json")
    report = json.loads(again.stdout)
    assert "is complete" in again.stderr and report["judged"]["against"]["mean_kl"] < 0.5


@pytest.mark.parametrize(
    ("flags", "flag", "words"),
    [
        (("--method", "hqq"), "--method", "hqq: there are rtn, gptq, awq, smoothquant"),
        (("--bits", "5.5", "--method", "smoothquant"), "--bits", "5.5"),
        (("--bits", "1"), "--bits", "averages between 4 and 8"),
        (("--group-size", "1"), "--group-size", "1: at least 2"),
        (("--group-size", "0"), "--group-size", "0: at least 2"),
        (("--act-order", "--method", "awq"), "--act-order", "awq"),
        (("--alpha", "0.3"), "--alpha", "smoothquant does"),
        (("--asym", "--method", "smoothquant"), "--asym", "without zeros"),
        (("--calib", "/nowhere/text"), "--calib", "/nowhere/text: No such file"),
        (("--calib", TEXT, "--calib-length", "100000"), "--calib-length", "beyond the model's context"),
        (("--calib-tokens", "1"), "--calib-tokens", "1: at least 2"),
        (("--quantize-head", *SMALL), "--quantize-head", "the table of embeddings too"),
        (("--ignore", "re:("), "--ignore", "no regular expression"),
        (("--ignore", "re:.*experts"), "--ignore", "re:.*experts: no layer of the model is called so; one is model."),
    ],
)
def test_flags_that_it_refuses(flags: tuple[str, ...], flag: str, words: str, tmp_path: Path) -> None:
    output = tmp_path / "out"
    found = run("demo", "--output", str(output), *flags)
    assert f"error: {flag}: " in found and words in found
    assert not list(output.glob("model*")), "nothing that could be served"


def test_models_and_folders_that_it_refuses(tmp_path: Path) -> None:
    output = tmp_path / "out"
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    for _ in ("a file that is too short", "one that is, after that, in the same folder"):
        assert "fewer than two sequences" in run("demo", "--output", str(output), "--calib", str(short))
        short.write_text("a few other words")
    assert "no such folder" in run("./nowhere", "--output", str(output))
    (tmp_path / "empty").mkdir()
    assert "no config.json" in run(str(tmp_path / "empty"), "--output", str(output))
    gpt2 = save_tiny_model(BY_NAME["gpt2"], tmp_path)
    assert "turned around" in run(str(gpt2), "--output", str(output), *SMALL)
    assert run_verb_here("quantize", "demo", "--output", str(tmp_path / "whole"), *SMALL).returncode == 0
    assert "is quantized already, with compressed-tensors" in run(str(tmp_path / "whole"), "--output", str(output))
    other = run("demo", "--output", str(tmp_path / "whole"), *SMALL, "--bits", "8")
    assert "with other settings: bits 4 (here 8.0)" in other
    assert "is not empty" in run("demo", "--output", str(tmp_path), *SMALL)


def test_a_full_disk_ends_it_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, write, room = tmp_path / "out", packed_checkpoint.write_tensors, [2]

    def full(file: Path, tensors: list[packed_checkpoint.WrittenTensor]) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write(file, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(packed_checkpoint, "write_tensors", full)
        found = run("demo", "--output", str(output), *SMALL)
    assert "No space left on device; the same command goes on" in found
    done = run_verb_here("quantize", "demo", "--output", str(output), *SMALL)
    assert done.returncode == 0 and "layer 1 of" not in done.stderr and "layer 3 of 4" in done.stderr


def test_a_short_text_calibrates_more_than_it_judges(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text((ROOT / "docs" / "tour.md").read_text()[:1200])
    done = run_verb_here("quantize", "demo", "--output", str(tmp_path / "out"), *SMALL, "--calib", str(text), "--json",
                         "--calib-tokens", "4096")  # fmt: skip
    tokens = int(done.stderr.partition("short.txt has ")[2].split()[0])
    assert f"has {tokens} tokens to calibrate with, not 4096" in done.stderr
    assert tokens > 5 * json.loads(done.stdout)["judged"]["tokens"]
