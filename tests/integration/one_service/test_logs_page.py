"""docs/serving/logs.md: its commands, pasted one after the other into a shell beside a service with JSON lines."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.service import BIN, REPOSITORY, Service

pytestmark = pytest.mark.cluster
PAGE = (REPOSITORY / "docs" / "serving" / "logs.md").read_text()
NOT_RUN = (".venv/bin/tandem serve", "group 8xk2", "127.0.0.1:40312", "request", "logging_config")
"""Beginnings of lines that start the service, or show a file."""
HERE = 'ssh() { shift; bash -c "$@"; }\n'
"""The only node is this machine."""
WRITTEN = "until [ $(cat $LOGS/requests-*.log | grep -c my-first) = 2 ]; do sleep 0.02; done"
"""Lines are written when the client has its answer already."""


def commands() -> list[str]:
    """Each command of the page, with the lines that continue it."""
    lines = re.findall(r"^    (\S(?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    return [line for line in lines if not line.startswith(NOT_RUN)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_commands(service: Service, tmp_path: Path) -> None:
    (tmp_path / ".local").mkdir()
    (tmp_path / ".local" / "state").symlink_to(service.state, target_is_directory=True)
    script = "\necho ----\n".join(commands()).replace("http://127.0.0.1:8000", service.url)
    script = script.replace("grep -h my-first", f"{WRITTEN}\ngrep -h my-first")
    environment = {**service.environment, "HOME": str(tmp_path), "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        ["bash", "-e", "-c", HERE + script.replace(".venv/bin/", f"{BIN}/")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done
    _, files, launcher, _, nodes, answer, mine, why, pretty = done.stdout.split("----\n")
    for name in ("launcher.log", "gateway-", "requests-", "group-", "rank-"):
        assert name in files
    assert "serving demo with 2 groups" in launcher
    assert "head " in nodes or not nodes.strip()
    assert json.loads(answer)["usage"]["completion_tokens"] > 0
    lines = [json.loads(line) for line in mine.splitlines()]
    assert [line["request_id"] for line in lines] == ["my-first"] * 2
    assert {line.get("path") for line in lines} == {None, "/v1/chat/completions"}
    assert {line.get("outcome") for line in lines} == {None, "stop"}
    assert why.startswith("request my-first: stop after ") and "decode: " in why
    assert '"request_id": "my-first"' in pretty
