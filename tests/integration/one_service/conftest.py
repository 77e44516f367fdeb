"""The service that the tests of this folder share."""

from collections.abc import Iterator

import pytest

from tests.support.proxies import DEAD_PROXIES
from tests.support.service import Service, tandem_serve, wait_for

FLAGS = (
    "demo", "-tp", "2", "-dp", "2", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "512",
    "--shutdown-timeout", "120",  # longer than any stream lasts on a busy machine
)  # fmt: skip


@pytest.fixture(scope="package")
def service() -> Iterator[Service]:
    """The demo model, 2 groups x TP 2 on CPU, started once by the real launcher. It ends with the last test of this
    folder, as even a service without requests takes a tenth of a core; Ctrl-C leaves nothing. All variables of proxies
    name one that does not answer: no traffic between its processes may meet it."""
    with tandem_serve(*FLAGS, env=DEAD_PROXIES) as running:
        wait_for(lambda: "serving demo" in running.output, 60, "both groups are ready")
        yield running
        status = running.stop()
        assert status == 0, running.output
        running.check_gone()
