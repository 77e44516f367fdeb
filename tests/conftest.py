"""Fixtures for the whole suite: one running service that tests marked `cluster` share, rank processes; plain signals;
which worker runs which tests.

A runner that was started with `&` by a script, or under nohup, ignores SIGINT, SIGQUIT or SIGHUP, and every process
that a test starts and interrupts would inherit that.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.support.service import Service, tandem_serve, wait_for

if TYPE_CHECKING:
    from tests.support.decoder_ranks import RankProcesses

SHARED = (
    "demo", "-tp", "2", "-dp", "2", "--device", "cpu", "--dtype", "float32", "--num-gpu-blocks-override", "512",
    "--shutdown-timeout", "120",  # longer than any stream lasts on a busy machine
)  # fmt: skip

# Every run draws the same examples and none is too slow on a busy machine; `make fuzz` draws others.
settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("fuzz"), derandomize=True)
settings.load_profile("same")
# Hypothesis also draws constants of the modules that are imported: which ones depends on the tests that ran before.
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """In every process that runs tests, before it starts another."""
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the first process's
        cache = tempfile.TemporaryDirectory(prefix="tandem-cache-")
        os.environ["XDG_CACHE_HOME"] = cache.name  # kernels are compiled once per run
        config.add_cleanup(cache.cleanup)


WAITING = ("tests/integration/", "tests/distributed/")
"""Tests that start services or ranks, and often wait for them."""
SHARING = {
    "the service": ("integration/test_service", "integration/test_official_clients"),
    "four ranks": (
        "distributed/test_memory_faults", "parity/test_decoder_parallel", "parity/test_kv_quant_logits",
        "parity/test_lora_logits", "parity/test_quantized_logits", "parity/test_streamed_layers",
        "unit/parallel/test_shared_memory", "unit/rank/test_weight_placement",
    ),
}  # fmt: skip
"""Files that one worker runs, as they share a fixture of the session that starts many processes."""
SCOPES = {f"tests/{stem}.py": name for name, stems in SHARING.items() for stem in stems}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spreads the files that wait evenly over the first four fifths of those that compute, so that one worker waits
    while another computes."""
    files: dict[bool, dict[str, list[pytest.Item]]] = {True: {}, False: {}}
    for item in items:
        file = item.nodeid.partition("::")[0]
        files[file.startswith(WAITING)].setdefault(file, []).append(item)
    waiting, computing = list(files[True].values()), list(files[False].values())
    places = [((at + 0.5) / max(1, len(computing)), of_file) for at, of_file in enumerate(computing)]
    places += [(0.8 * at / len(waiting), of_file) for at, of_file in enumerate(waiting)]
    items[:] = [item for _, of_file in sorted(places, key=lambda place: place[0]) for item in of_file]


class ByFile(LoadScopeScheduling):
    """A file, or files that share a fixture, go to one worker, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SCOPES.get(file, file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session")
def ranks() -> Iterator["RankProcesses"]:
    """Processes for cases of up to four ranks, which start within seconds once each."""
    from tests.support.decoder_ranks import RankProcesses  # loads torch

    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """The demo model, 2 groups x TP 2 on CPU, started once by the real launcher; Ctrl-C at the end leaves nothing."""
    with tandem_serve(*SHARED) as running:
        wait_for(lambda: "serving demo" in running.output, 60, "both groups are ready")
        yield running
        status = running.stop()
        assert status == 0, running.output
        running.check_gone()
