"""Fixtures for the whole suite: one running service that tests marked `cluster` share."""

from collections.abc import Iterator

import pytest

from tests.support.service import Service, tandem_serve

SHARED = ("demo", "-tp", "2", "-dp", "2", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "512")


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The demo model, 2 groups x TP 2 on CPU, started once by the real launcher; Ctrl-C at the end leaves nothing."""
    with tandem_serve(*SHARED) as running:
        yield running
        status = running.stop()
        assert status == 0, running.output
        running.check_gone()
