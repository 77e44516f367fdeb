"""A verb of the command line in this process: no interpreter starts, no library is loaded anew."""

import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import patch

from tandem.cluster.cli.main import run_verb
from tandem.cluster.process import supervisor


def run_verb_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`tandem ARGUMENTS` with its status and output; it must not begin to start a service."""
    output, errors = (TextIOWrapper(BytesIO(), "utf-8", write_through=True) for _ in range(2))  # some verbs write bytes
    started = patch.object(supervisor, "split", side_effect=AssertionError("it begins to start a service"))
    with redirect_stdout(output), redirect_stderr(errors), patch.object(sys, "argv", ["tandem", *arguments]), started:
        try:
            run_verb()
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
