"""docs/serving/batches.md against the shared service: its commands in a shell, its script as it stands; and those of
docs/serving/openai.md about requests that are sent again."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service import REPOSITORY, Service

pytestmark = pytest.mark.cluster
PAGE = (REPOSITORY / "docs" / "serving" / "batches.md").read_text()


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=folder, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_commands_run_a_batch(service: Service, tmp_path: Path) -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    script = commands.replace("http://127.0.0.1:8000", service.url).replace("sleep 1", "sleep 0.2")
    rows = list(map(json.loads, run(["bash", "-e", "-c", script], tmp_path).splitlines()))
    assert [row["custom_id"] for row in rows] == [f"sum-{n}" for n in range(1, 6)]
    for n, row in enumerate(rows, 1):
        assert f"{n} + 2 = {n + 2}" in row["response"]["body"]["choices"][0]["message"]["content"]


def test_its_script_runs_with_openais_client(service: Service, tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    said = run([sys.executable, "-c", script.replace("http://127.0.0.1:8000", service.url)], tmp_path)
    assert [line.split(" ", 1)[0] for line in said.splitlines()] == [f"sum-{n}" for n in range(1, 6)]
    assert all(f"{n} + 3 = {n + 3}" in line for n, line in enumerate(said.splitlines(), 1))
    assert service.metric("batch_lines_total") >= 5 and not service.metric("batch_lines_running")


def test_a_request_that_is_sent_again_is_answered_once(service: Service, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "serving" / "openai.md").read_text()
    section = page.partition("## Requests that are sent again")[2]
    commands = section.partition("```bash\n")[2].partition("```")[0]
    said = run(["bash", "-e", "-c", commands.replace("http://127.0.0.1:8000", service.url)], tmp_path)
    first, again, other = re.split(r"^HTTP/1.1 ", said, flags=re.MULTILINE)[1:]
    bodies = [answer.replace("\r", "").partition("\n\n")[2].strip() for answer in (first, again)]
    assert bodies[0] == bodies[1] and json.loads(bodies[0])["usage"]["completion_tokens"]
    assert first.startswith("200") and "idempotent-replayed" not in first
    assert again.startswith("200") and "idempotent-replayed: true" in again
    assert other.startswith("409") and "idempotency_key_reused" in other
