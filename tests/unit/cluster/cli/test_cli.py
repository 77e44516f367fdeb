"""The console script: help at any width, the version, and errors that name what was typed."""

import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tandem.cluster.cli.main import run_verb
from tandem.configs.load import default_of
from tandem.configs.options import OPTIONS
from tests.support.verbs import invoked

NAMES_OF_VERBS = ("serve", "run-batch", "chat", "complete", "status", "usage", "tenants", "check-config", "doctor")


def printed(*arguments: str, columns: int = 80) -> str:
    """What `tandem ARGUMENTS` prints on a terminal of this width."""
    done = invoked(arguments, env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_shows_every_flag_whole_with_its_group(columns: int) -> None:
    text = printed("serve", "--help", columns=columns)
    words = text.replace(",", " ").split()
    for option in OPTIONS:
        for flag in (option.flag, *option.aliases):
            assert flag in words, flag
        if option.kind is bool and default_of(option):
            assert f"--no-{option.flag.removeprefix('--')}" in words
        assert f"\n{option.group}:\n" in text
    assert "…" not in text
    if columns == 80:
        assert max(map(len, text.splitlines())) <= 80


def test_the_list_of_verbs_is_not_cut() -> None:
    text = printed("--help")
    assert "..." not in text.partition("Commands:")[2]
    for verb in NAMES_OF_VERBS:
        assert f"\n  {verb} " in text


def test_only_a_flag_that_is_written_alike_is_offered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, offered in (
        ("--max-modl-len", "--max-model-len"),
        ("--gpu-memory", "--gpu-memory-utilization"),
        ("--enable-chunk-scheduling", None),  # click would offer --enable-prefix-caching, and others alike
        ("--frobnicate", None),
    ):
        monkeypatch.setattr(sys, "argv", ["tandem", "serve", "demo", flag])
        with pytest.raises(SystemExit) as ended:
            run_verb()
        said = capsys.readouterr().err
        assert ended.value.code == 2 and flag in said
        assert (offered in said) if offered is not None else ("ossible" not in said and "mean" not in said), said


def test_the_version_is_the_packages() -> None:
    assert printed("--version") == f"tandem {version('tandem-serve')}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "./no-such"),
        ("serve", "no-such"),
        ("check-config", "throughput", "no-such"),
        ("serve", "demo", "--tokenizer", "no-such"),
    ],
)
def test_a_model_that_is_not_there_is_named(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("sys.argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        run_verb()
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert "no-such" in shown and ("no such folder" in shown or "no folder here" in shown)
    assert "json" not in shown and shown.count("\n") == 1


@pytest.mark.parametrize("is_ignored", [False, True])
@pytest.mark.parametrize(
    ("imported", "status"), [("tandem.cluster.cli.main", -signal.SIGINT), ("tandem.cluster.service.launcher", 130)]
)
def test_an_early_interrupt_ends_it_without_a_traceback(imported: str, status: int, is_ignored: bool) -> None:
    """While Python imports, and while the verb is at work but not yet its supervisor; under a script's `&` too."""
    slow = f"""
import sys, time

class Slow:
    def find_spec(self, name, *more):
        if name == {imported!r}:
            print("ready", flush=True)
            time.sleep(45)

sys.meta_path.insert(0, Slow())
sys.argv = ["tandem", "serve", "demo"]
from tandem.cluster.cli.console import main
main()
"""
    command, pipe = [sys.executable, "-c", slow], subprocess.PIPE
    if is_ignored:
        command = ["sh", "-c", """trap '' INT; exec "$@\"""", "sh", *command]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == status and b"Traceback" not in said
