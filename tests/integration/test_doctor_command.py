"""The commands of docs/operations.md that check the machine, run as they stand on this one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TANDEM = Path(sys.executable).parent / "tandem"
SECTION = (ROOT / "docs" / "operations.md").read_text().partition("## Check a machine")[2].partition("\n## ")[0]
COMMANDS = re.findall(r"^    \.venv/bin/tandem (doctor.*)$", SECTION, re.MULTILINE)
CHOSEN = [
    "device",
    "dtype",
    "attention",
    "fused ops",
    "linear",
    "experts",
    "LoRA ops",
    "sampling",
    "collectives",
    "graphs",
]


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TANDEM, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    "command", [pytest.param(text, marks=() if "--json" in text else pytest.mark.chaos) for text in COMMANDS]
)
def test_the_commands_of_the_guide(command: str) -> None:
    """All checks pass on this machine; whether its parts fit together decides the exit status."""
    done = run(command)
    if "--json" in command:
        found = json.loads(done.stdout)
        statuses = {check["name"]: check["status"] for check in found["checks"]}
        misfits, chosen = len(found["misfits"]), [choice["subject"] for choice in found["choices"]]
        assert found["fits"] is (done.returncode == 0)
        assert any("CPU capability" in line for line in found["torch_build"]) and found["report"]["packages"]["torch"]
    else:
        checks = done.stdout.partition("\nChecks\n")[2]
        statuses = {
            name: status for status, name in re.findall(r"^  (ok|failed|not here) +(.*?)  ", checks, re.MULTILINE)
        }
        misfits = len(re.findall(r"^  - ", done.stdout, re.MULTILINE))
        rows = done.stdout.partition("Chosen here without flags\n")[2].partition("\n\n")[0].splitlines()
        chosen = [re.split(r"  +", row.strip())[0] for row in rows]
    assert len(statuses) == 22 and "failed" not in statuses.values(), done.stdout
    assert statuses["KV store and load"] == statuses["all-reduce of two ranks"] == "ok"
    assert chosen == CHOSEN
    assert done.returncode == (1 if misfits else 0), done.stdout + done.stderr


def test_the_guide_has_both_forms() -> None:
    assert COMMANDS == ["doctor", "doctor --json"]
