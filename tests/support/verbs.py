"""A verb of the command line in this process: no interpreter starts, no library is loaded anew."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from functools import cache
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import typer
import typer.testing

from tandem.cluster.cli import main
from tandem.cluster.process import supervisor

BUILD = cache(main.build_app)
typer.testing._get_command = cache(typer.main.get_command)  # of one app, typer's runner makes it at each call


@cache
def _command() -> Any:
    return typer.main.get_command(BUILD())


def invoked(arguments: Sequence[str], **given: Any) -> typer.testing.Result:
    """What typer's runner says of `tandem ARGUMENTS`, whose command line is made once. given: more for the runner."""
    return typer.testing.CliRunner().invoke(BUILD(), arguments, **given)


def built_once() -> AbstractContextManager[Any]:
    """Calls of run_verb() share one command line: typer takes a quarter of a CPU second to make it."""
    return patch.object(main, "build_app", _command)


def _no_start() -> NoReturn:
    raise AssertionError("it begins to start a service")


def run_verb_here(*arguments: str, split: Callable[[], object] = _no_start) -> subprocess.CompletedProcess[str]:
    """`tandem ARGUMENTS` with its status and output; it must not begin to start a service. split: what makes the
    launcher's process otherwise."""
    output, errors = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))  # some verbs write bytes
    started = patch.object(supervisor, "split", split)
    argv = patch.object(sys, "argv", ["tandem", *arguments])
    with redirect_stdout(output), redirect_stderr(errors), argv, started, built_once():
        try:
            main.run_verb()
        except SystemExit as end:
            status = end.code
    assert status is None or isinstance(status, int)
    return subprocess.CompletedProcess(arguments, status or 0, _text_of(output), _text_of(errors))


def _text_of(written: TextIOWrapper) -> str:
    buffer = written.buffer
    assert isinstance(buffer, BytesIO)
    return buffer.getvalue().decode()


def run_verb_of(temp: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same as the user of the service whose temp folder this is, so that it finds the run file. Not beside threads
    that print."""
    environment = patch.dict(os.environ, {"TMPDIR": str(temp), "XDG_RUNTIME_DIR": ""})
    with environment, patch.object(tempfile, "tempdir", None):
        return run_verb_here(*arguments)
