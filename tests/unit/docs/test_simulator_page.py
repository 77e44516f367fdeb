"""The commands of the simulator's page that need no service are run as they stand, with the files that it shows."""

import re
import shlex
from pathlib import Path

import pytest

from tests.support.verbs import run_verb_here

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/serving/simulator.md").read_text()
COMMANDS = re.findall(r"^    \.venv/bin/tandem (simulate (?!path-or-hub-id).*)$", PAGE, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (times,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    (tmp_path / "times.json").write_text(times)
    (scaled,) = re.findall(
        r"Write `scaled.yaml`:\n\n((?:    .*\n)+)", (ROOT / "docs/serving/autoscaling.md").read_text()
    )
    (tmp_path / "scaled.yaml").write_text(re.sub(r"^    ", "", scaled, flags=re.M))
    monkeypatch.chdir(tmp_path)
    done = run_verb_here(*shlex.split(command), "--disable-tqdm")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "goodput/s" in done.stdout


def test_the_page_has_commands_to_run() -> None:
    assert len(COMMANDS) == 2
