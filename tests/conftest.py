"""Fixtures for the whole suite: one running service that tests marked `cluster` share."""

from collections.abc import Iterator

import pytest

from tests.support.service import Service, tandem_serve


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The demo model, 2 groups x TP 2 on CPU, started once by the real launcher."""
    with tandem_serve("demo", "-tp", "2", "-dp", "2", "--device", "cpu", "--num-gpu-blocks-override", "256") as running:
        yield running
        status = running.stop()
        running.check_gone()
        assert status == 0, running.output
