"""docs/offline.md: its Python example and its batch line are run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "offline.md").read_text()


def test_the_python_example_answers(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(PAGE.split("```python\n")[1].split("```")[0])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line] == [f"{n} + 4 = {n + 4}" for n in range(5)]


def test_the_batch_command_and_line_work(tmp_path: Path) -> None:
    line = re.search(r'^    (\{"custom_id".*\})$', PAGE, re.MULTILINE)
    command = re.search(r"^    \.venv/bin/tandem (run-batch .*)$", PAGE, re.MULTILINE)
    assert line is not None and command is not None
    (tmp_path / "requests.jsonl").write_text(line[1] + "\n")
    tandem = Path(sys.executable).parent / "tandem"
    done = subprocess.run(
        [str(tandem), *command[1].split()], capture_output=True, text=True, timeout=180, cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 + 3 = 5" in (tmp_path / "results.jsonl").read_text()
