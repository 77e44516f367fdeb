"""`tandem distill`: what it refuses, by flag and value, before anything is computed; and the page's commands."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tandem.configs.load import build_settings
from tandem.workers.planning.resolve import draft_spec
from tests.support.tiny_models import BY_NAME, save_tiny_model
from tests.support.verbs import run_verb_here
from tools.demo_model.prompts import prompts as prompts_of_demo

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs/serving/distilling.md").read_text()
COMMANDS = [line.split() for line in re.findall(r"^    \.venv/bin/tandem (distill .*)$", PAGE, re.M)]
QUICK = ("--steps", "2", "--answers", "1", "--max-tokens", "8", "--cpu-threads", "1")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Spell the word dog.\nCount from 1 to 9.\n")
    return file


def refused(*arguments: object) -> str:
    """What it says on standard error."""
    done = run_verb_here("distill", *map(str, arguments))
    assert done.returncode == 2 and not done.stdout, done
    return done.stderr


def test_the_command_of_the_page(tmp_path: Path) -> None:
    """With prompts as the page makes them, but fewer."""
    assert [command[1] for command in COMMANDS] == ["draft", "eagle", "medusa", "eagle"]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in prompts_of_demo(40, 0)))
    command = [word.replace("/tmp", str(tmp_path)) for word in COMMANDS[0]]
    done = run_verb_here(*command, *QUICK)
    assert done.returncode == 0 and "written to  " in done.stdout and "tokens a step" in done.stdout, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("to serve")]
    words = shlex.split(line.removeprefix("to serve"))
    assert words[:4] == ["tandem", "serve", "demo", "--speculative-config"] and len(words) == 5
    drafts = {"model": str(tmp_path / "demo-draft"), "num_speculative_tokens": 4}
    assert json.loads(words[4]) == {"method": "draft_model", **drafts}
    assert (
        draft_spec(
            build_settings(str(ROOT / "configs/demo/model"), {"speculative_config": json.loads(words[4])}).engine
        )
        is not None
    )
    again = run_verb_here(*command, *QUICK, "--json")
    assert "is complete" in again.stderr and json.loads(again.stdout)["training_steps"] == 2


@pytest.mark.parametrize(
    ("method", "flags", "flag", "words"),
    [
        ("mtp", (), "METHOD", "mtp: there are draft, eagle, medusa"),
        ("draft", ("--minutes", "0"), "--minutes", "0: more than 0"),
        ("draft", ("--minutes", "-3"), "--minutes", "-3: more than 0"),
        ("draft", ("--minutes", "nan"), "--minutes", "nan: more than 0"),
        ("draft", ("--steps", "0"), "--steps", "0: at least 1"),
        ("draft", ("--layers", "0"), "--layers", "0: at least 1"),
        ("draft", ("--hidden", "100"), "--hidden", "100 is no multiple of 32, the size of the target's heads"),
        ("draft", ("--hidden", "128", "--heads", "3"), "--hidden", "128 has no 3 heads"),
        ("draft", ("--draft-vocab", "100"), "--draft-vocab", "draft has the target's whole vocabulary"),
        ("eagle", ("--draft-vocab", "769"), "--draft-vocab", "769: the target has 768 tokens"),
        ("eagle", ("--hidden", "64"), "--hidden", "eagle has the target's"),
        ("eagle", ("--layers", "2"), "--layers", "2: an EAGLE-3 head has one layer"),
        ("medusa", ("--heads", "4"), "--heads", "medusa has the target's"),
        ("medusa", ("--num-speculative-tokens", "17"), "--num-speculative-tokens", "17: from 1 to 16"),
        ("draft", ("--max-tokens", "2"), "--max-tokens", "2: at least 8"),
        ("draft", ("--answers", "0"), "--answers", "0: at least 1"),
        ("draft", ("--learning-rate", "2"), "--learning-rate", "2: between 0 and 1"),
        ("draft", ("--cpu-threads", "0"), "--cpu-threads", "0: at least 1"),
    ],
)
def test_flags(method: str, flags: tuple[str, ...], flag: str, words: str, prompts: Path, tmp_path: Path) -> None:
    found = refused(method, "demo", "--prompts", prompts, "--out", tmp_path / "out", *flags)
    assert f"error: {flag}: " in found and words in found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("missing.txt", None, "No such file"),
        ("empty.txt", b" \n\n", "has no prompt"),
        ("latin.txt", b"caf\xe9\n", "is not UTF-8: byte 3"),
        ("one.txt", b"Hello.\nHello.\n", "1 prompts that fit into the context"),
        ("words.jsonl", b'"Hello."\n', 'line 1 has neither a text "prompt" nor a list "messages"'),
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt":\n', "line 2 is not JSON"),
        ("roles.jsonl", b'{"messages": [{"no": "role"}]}\n', "line 1: "),
    ],
)
def test_files_of_prompts(name: str, text: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text)
    found = refused("draft", "demo", "--prompts", file, "--out", tmp_path / "out")
    assert "error: --prompts: " in found and str(file) in found and words in found


def test_targets_and_folders(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = refused("draft", tmp_path / "nowhere", "--prompts", prompts, "--out", out)
    assert "error: TARGET: " in found and f"{tmp_path / 'nowhere'}: no such folder" in found
    plain = save_tiny_model(BY_NAME["olmo2"], tmp_path / "plain")
    shallow = json.loads((plain / "config.json").read_text())
    assert shallow["num_hidden_layers"] < 4
    (plain / "tokenizer.json").write_bytes((ROOT / "configs/demo/model/tokenizer.json").read_bytes())
    assert "layers: an EAGLE-3 head reads" in refused("eagle", plain, "--prompts", prompts, "--out", out)
    out.mkdir()
    (out / "mine").touch()
    found = refused("draft", "demo", "--prompts", prompts, "--out", out)
    assert f"error: --out: {out} is not empty" in found and (out / "mine").exists()
