"""The service that the tests of this folder share: that of docs/multi-tenancy.md, one group behind an admin key."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.doors import bearer
from tests.support.ends import end_by_a_drain
from tests.support.service import BIN, REPOSITORY, Service, free_port

ROWS, BLOCKS, STEP_TOKENS = 8, 8192, 64
DRAIN_S = 8


@pytest.fixture(scope="package")
def step_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps") / "steps.jsonl"


@pytest.fixture(scope="package")
def closed(step_log: Path) -> Iterator[Service]:
    """Its steps are short, so that clients may leave while their prompts are computed. It ends with the last test of
    this folder, while it has requests: short streams end well, long ones are cut cleanly, late requests are refused."""
    page = (REPOSITORY / "docs" / "multi-tenancy.md").read_text()
    (start,) = re.findall(r"^    \.venv/bin/tandem (serve .*)$", page, re.MULTILINE)
    small = ("--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", str(BLOCKS))
    steps = ("--max-num-seqs", str(ROWS), "--max-num-batched-tokens", str(STEP_TOKENS), "--step-log", str(step_log))
    port = free_port()
    own = ("--shutdown-timeout", str(DRAIN_S), "--port", str(port))
    running = Service([str(BIN / "tandem"), *start.split(), *small, *steps, *own], port, cwd=REPOSITORY)
    try:
        yield running.wait_ready()
        end_by_a_drain(running, bearer("boss"), DRAIN_S)
    finally:
        running.clean()
