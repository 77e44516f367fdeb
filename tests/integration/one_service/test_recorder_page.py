"""docs/serving/recorder.md: its commands, pasted into a shell beside a service whose groups record."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.service import BIN, REPOSITORY, Service, wait_for

pytestmark = pytest.mark.cluster
PAGE = (REPOSITORY / "docs" / "serving" / "recorder.md").read_text()
NOT_RUN = (".venv/bin/tandem serve", "call 4711", "recorded:", "replayed:")
"""Beginnings of lines that start the service, or show a difference."""


def commands() -> list[str]:
    """Each command of the page, with the lines that continue it."""
    lines = re.findall(r"^    (\S(?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    return [line for line in lines if not line.startswith(NOT_RUN)]


def recordings(service: Service) -> set[Path]:
    return set(service.state.rglob("*.recording"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_commands(service: Service, tmp_path: Path) -> None:
    *asked, signal = commands()
    before = recordings(service)
    assert signal.startswith("kill -USR2"), signal
    script = "\n".join(asked).replace("http://127.0.0.1:8000", service.url).replace(".venv/bin/", f"{BIN}/")
    script = script.replace("tandem status", f"tandem status --url {service.url}")
    environment = {**service.environment, "no_proxy": "127.0.0.1"}

    def paste(text: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "-e", "-c", text]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    done = paste(script)
    assert done.returncode == 0, done
    assert re.fullmatch(r"\d+ steps, all plans equal\n", done.stdout), done
    answer = json.loads((tmp_path / "recording.json").read_text())
    assert answer["object"] == "recording" and answer["mode"] == "redacted" and answer["num_calls"] > 0
    (written,) = recordings(service) - before
    assert Path(answer["file"]) == written and written.stat().st_size == answer["num_bytes"]
    assert f"group-{answer['group']}-" in written.name and written.stat().st_mode & 0o777 == 0o600
    assert b"Once" not in written.read_bytes()

    signal = signal.replace(".venv/bin/", f"{BIN}/").replace("tandem status", f"tandem status --url {service.url}")
    done = paste(signal)
    assert done.returncode == 0, done
    (new,) = wait_for(lambda: recordings(service) - before - {written}, 30, "the signal's recording")
    wait_for(lambda: any(f"its steps are in {new}" in text for text in service.log_files().values()), 10, "its line")
    assert service.get("/health").status_code == 200, "the signal ends nothing"


def test_who_cannot_be_recorded_is_named(service: Service) -> None:
    answer = service.post("/admin/groups/nobody/record", {})
    assert answer.status_code == 404 and "no group 'nobody'" in answer.json()["error"]["message"]
