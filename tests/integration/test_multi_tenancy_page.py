"""docs/multi-tenancy.md, pasted from the top to the end into one shell: only the port is the test service's."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ends import end_by_a_dead_ray
from tests.support.service import BIN, Service, free_port, wait_for

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "multi-tenancy.md").read_text()


def statuses(output: str) -> list[int]:
    return [int(status) for status in re.findall(r"^HTTP/1.1 (\d+)", output, re.MULTILINE)]


def rows(usage: str) -> int:
    """Of alice's requests."""
    return usage.count("\nalice,") + usage.count(",alice,")


def paste(service: Service, commands: str) -> str:
    """What a shell says to them, with the service's address in place of the page's."""
    script = commands.replace("http://127.0.0.1:8000", service.url).replace(".venv/bin/tandem", str(BIN / "tandem"))
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=service.environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    (start,) = re.findall(r"^    \.venv/bin/(tandem serve .*)$", PAGE, re.MULTILINE)
    port = free_port()
    command = [str(BIN / "tandem"), *start.split()[1:], "--port", str(port), "--device", "cpu"]
    running = Service(command, port, cwd=ROOT)
    try:
        yield running.wait_ready()
    finally:
        running.clean()


def test_the_page_as_a_newcomer_pastes_it(service: Service) -> None:
    *blocks, bill = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    tenants, adapters, answers, refusals, limit = paste(service, "\necho ---\n".join(blocks)).split("---\n")
    accepted = 2 + statuses(limit).count(200)
    wait_for(lambda: rows(paste(service, bill)) >= accepted, 60, "rows come a second or so after their requests")
    usage = paste(service, bill)
    assert "alice" in tenants and "bob" in tenants
    assert "pirate@" in adapters and "alice" in adapters and "public" in adapters
    assert statuses(answers) == [200, 200, 200]
    assert "I am fine" in answers and "Arr!" in answers and "I AM" in answers
    assert statuses(refusals) == [404, 401]
    assert "model_not_found" in refusals and "invalid_api_key" in refusals
    codes = statuses(limit)
    assert len(codes) == 5 and codes[0] == 200 and set(codes) == {200, 429}
    assert "x-ratelimit-remaining-requests: 0" in limit.lower() and "retry-after:" in limit.lower()
    assert re.search(r"alice +pirate +pirate@", usage) and re.search(r"bob +shout +shout@", usage)
    assert rows(usage) == accepted, "a row for each request that was accepted"


def test_a_service_whose_ray_has_died_ends_with_one_line(service: Service) -> None:
    end_by_a_dead_ray(service)
