"""What README.md and docs/serving.md tell a newcomer to paste, pasted: only the port is the test service's."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service import Service

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_URL = "http://127.0.0.1:8000"
pytestmark = pytest.mark.cluster


def pasted(page: str, service: Service) -> str:
    """The page with the service's address instead of the default one."""
    return (ROOT / page).read_text().replace(DEFAULT_URL, service.url)


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
@pytest.mark.parametrize(("page", "answer"), [("README.md", "2 + 3 = 5"), ("docs/serving.md", "data: [DONE]")])
def test_the_curl_commands(service: Service, page: str, answer: str) -> None:
    commands = re.findall(r"^    (curl .*\\\n.*)$", pasted(page, service), re.MULTILINE)
    assert commands
    assert answer in run(["bash", "-c", 'curl() { command curl --silent --no-buffer "$@"; }\n' + commands[0]])


def test_the_openai_example(service: Service) -> None:
    blocks = re.findall(r"```python\n(.*?)```", pasted("README.md", service), re.DOTALL)
    example = next(block for block in blocks if "from openai" in block)
    assert run([sys.executable, "-c", example]) == "1, 2, 3, 4, 5, 6, 7, 8, 9"
