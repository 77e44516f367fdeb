"""Completion in shells, as a user has it: a shell on a terminal reads the script, and a TAB completes."""

import os
import pty
import re
import select
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tandem.cluster.cli.main import build_app
from tandem.cluster.cli.shells.command_words import FlagWords, VerbWords, verbs_of
from tandem.cluster.cli.shells.completion import SCRIPTS
from tandem.configs.options import OPTIONS
from tests.support.verbs import invoked

START = {
    "bash": ["bash", "--noprofile", "--norc", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
BEFORE = {"bash": "", "zsh": "autoload -Uz compinit; compinit -D; ", "fish": ""}
TYPED = {
    "tandem completi\tfi\t": "completion fish",
    "tandem serve --max-mod\t4k --dtype bf\t": "serve --max-model-len 4k --dtype bfloat16",
    "tandem adapters ad\t--publ\t": "adapters add --public",
    "tandem check-c\tservi\t": "check-config service.yaml",
    "tandem usage --format cs\t--redi\tx": "usage --format csv --redis-url x",
}
"""What is typed, with tabs, and the words that `tandem` gets."""
DEADLINE_S = 60.0


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[int]:
    """A program on a terminal, in `folder`, which has a program `tandem`; yields the terminal's file."""
    pid, end = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"})
    try:
        yield end
    finally:
        os.close(end)
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
        os.waitpid(pid, 0)


def read_until(end: int, wanted: bytes) -> None:
    """Reads what the terminal shows until it shows `wanted`."""
    shown, deadline = b"", time.monotonic() + DEADLINE_S
    while wanted not in shown:
        assert select.select([end], [], [], max(0.0, deadline - time.monotonic()))[0], shown.decode(errors="replace")
        shown += os.read(end, 65536)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_a_tab_completes_and_runs_no_tandem(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        assert shell != "bash"
        pytest.skip(f"{shell} is not installed")
    script = invoked(["completion", shell])
    assert script.exit_code == 0
    (tmp_path / "script").write_text(script.output)
    (tmp_path / "service.yaml").write_text("")
    stub = tmp_path / "tandem"
    stub.write_text('#!/bin/sh\necho "$*" >> calls\necho "GOT" "IT"\n')
    stub.chmod(0o755)
    with terminal(START[shell], tmp_path) as end:
        os.write(end, f"{BEFORE[shell]}. ./script; echo RE''ADY\n".encode())
        read_until(end, b"READY")
        for typed in TYPED:
            os.write(end, f"{typed}\n".encode())
            read_until(end, b"GOT IT")
    calls = (tmp_path / "calls").read_text().replace("=", " ")  # zsh writes --flag=value
    assert calls.splitlines() == list(TYPED.values())


def test_every_flag_and_value_is_in_every_script() -> None:
    root: Any = typer.main.get_command(build_app())
    verbs = verbs_of(root)
    serve = next(verb for verb in verbs if verb.path == ("serve",))
    assert {option.flag for option in OPTIONS} <= {name for flag in serve.flags for name in flag.names}
    assert "--swap-space" not in {name for flag in serve.flags for name in flag.names}, "hidden"
    assert ("tenants", "rotate-key") in {verb.path for verb in verbs}
    odd = VerbWords(("odd",), "It's [new]: so", (FlagWords(("--odd",), "It's [b]", "A:B", ("x", "y"), True),), ())
    for make in SCRIPTS.values():
        text = make(
            [*verbs, odd],
            {"tenants": "Of tenants", "adapters": "Of adapters", "bench": "Of speed", "routes": "Of costs"},
        )
        words = set(re.findall(r"[\w-]+", text))
        for verb in (*verbs, odd):
            for flag in verb.flags:
                assert {name.lstrip("-") for name in flag.names} | set(flag.choices) <= {w.lstrip("-") for w in words}


def test_another_shell_is_refused_by_name() -> None:
    refused = invoked(["completion", "tcsh"])
    assert refused.exit_code == 2 and "tcsh" in refused.output and "bash" in refused.output
