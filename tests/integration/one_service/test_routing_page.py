"""docs/serving/routing.md: its commands, pasted into a shell beside a service of two groups."""

import re
import shutil
import subprocess

import pytest

from tests.support.service import BIN, REPOSITORY, Service

pytestmark = pytest.mark.cluster
PAGE = (REPOSITORY / "docs" / "serving" / "routing.md").read_text()
NOT_RUN = (".venv/bin/tandem serve", "x-tandem-route:")
"""Beginnings of lines that start a service, or show an answer."""


def commands() -> list[str]:
    lines = re.findall(r"^    (\S(?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    return [line for line in lines if not line.startswith(NOT_RUN)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_commands(service: Service) -> None:
    script = "\necho ----\n".join(commands()).replace("http://127.0.0.1:8000", service.url)
    script = script.replace("routes explain", f"routes explain --url {service.url}").replace(".venv/bin/", f"{BIN}/")
    environment = {**service.environment, "no_proxy": "127.0.0.1"}
    done = subprocess.run(["bash", "-e", "-c", script], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done
    header, table = done.stdout.split("----\n")
    told = re.fullmatch(
        r"x-tandem-route: (\w+) overlap=\d+\+\d+ outstanding=\d+ adapter=- second=(\w+)", header.strip()
    )
    assert told is not None, header
    policy, head, *groups = table.splitlines()
    assert policy.startswith("policy joint; prompt 4 tokens, ") and head.split()[:2] == ["group", "cost"]
    assert {line.split()[0] for line in groups} == set(told.groups())
    assert [line.split()[0] for line in groups if line.endswith("home")] == [told[1]], "alice's home took her request"
