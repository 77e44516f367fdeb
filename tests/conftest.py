"""Fixtures for the whole suite: rank processes that files share; plain signals; which worker runs which tests.

A runner that was started with `&` by a script, or under nohup, ignores SIGINT, SIGQUIT or SIGHUP, and every process
that a test starts and interrupts would inherit that.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler.loadscope import LoadScopeScheduling

from tandem.configs.environment import imitate_cpu
from tandem.configs.errors import SettingsError
from tests.left_to import mark_of
from tests.support.freed_memory import give_back

if TYPE_CHECKING:
    from tests.support.decoder_ranks import RankProcesses
    from tests.support.private_redis import ReusedRedis

# Every run draws the same examples and none is too slow on a busy machine; `make fuzz` draws others.
settings.register_profile("fuzz", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("fuzz"), derandomize=True)
settings.load_profile("same")
# Hypothesis also draws constants of the modules that are imported: which ones depends on the tests that ran before.
providers._get_local_constants = lambda: providers._local_constants


def pytest_configure(config: pytest.Config) -> None:
    """In every process that runs tests, before it starts another."""
    try:
        imitate_cpu()
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    config.add_cleanup(gc.unfreeze)  # after all other cleanups: at exit, some libraries tell of objects not freed
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have the first process's
        os.environ["XDG_CACHE_HOME"] = str(
            KEPT
        )  # kernels are compiled once, and again when what they are made of changes
        state = tempfile.TemporaryDirectory(prefix="tandem-state-")
        os.environ["XDG_STATE_HOME"] = state.name  # for log files
        config.add_cleanup(state.cleanup)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What the collection loads and makes stays until the end: nothing looks through its millions of objects again and
    again for what could be freed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    give_back()


KEPT = Path(__file__).resolve().parents[1] / "out" / "tests" / "cache"
"""What is compiled stays for the next run, under names that are digests of sources, flags, compiler and CPU
(kernel_cache.py): two CPU minutes. `make clean` removes it."""
WAITING = ("tests/integration/", "tests/distributed/", "tests/lab/")
"""Tests that start services or ranks, and often wait for them."""
SHARING = {
    "one service": ("integration/one_service/",),
    "one tenancy": ("integration/one_tenancy/",),
    "lab": ("lab/test_lab", "lab/test_ranks_of_two_nodes", "lab/test_service_of_two_nodes"),
    "four ranks": (
        "distributed/test_memory_faults", "parity/test_decoder_parallel", "parity/test_gguf_checkpoints",
        "parity/test_kv_quant_logits", "parity/test_lora_logits", "parity/test_made_at_load",
        "parity/test_quantized_checkpoints", "parity/test_quantized_forms", "parity/test_quantized_logits",
        "parity/test_sinks", "parity/test_stored_heads", "parity/test_streamed_layers",
        "unit/graphs/test_replaying_ranks", "unit/parallel/test_shared_memory", "unit/rank/test_weight_placement",
    ),
}  # fmt: skip
"""Files, or folders of them, that one worker runs one after the other, as they share processes that take long to
start."""
SCOPES = {f"tests/{stem}": name for name, stems in SHARING.items() for stem in stems}


def scope_of(nodeid: str) -> str:
    """The test's file, or the name of what its file shares with others."""
    file = nodeid.partition("::")[0]
    folder = f"{file.rpartition('/')[0]}/"
    return SCOPES.get(file.removesuffix(".py")) or SCOPES.get(folder, file)


@pytest.hookimpl(tryfirst=True)  # before those that -m leaves out are taken away
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is left to other goals (left_to.py), and spreads the files that wait evenly over the first four fifths
    of those that compute, so that one worker waits while another computes."""
    scopes: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (mark := mark_of(item.nodeid)) is not None:
            item.add_marker(mark)
        scopes.setdefault(scope_of(item.nodeid), []).append(item)
    waiting = [scope for scope in scopes.values() if scope[0].nodeid.startswith(WAITING)]
    computing = [scope for scope in scopes.values() if not scope[0].nodeid.startswith(WAITING)]
    places = [((at + 0.5) / max(1, len(computing)), scope) for at, scope in enumerate(computing)]
    places += [(0.8 * at / len(waiting), scope) for at, scope in enumerate(waiting)]
    items[:] = [item for _, scope in sorted(places, key=lambda place: place[0]) for item in scope]


class ByFile(LoadScopeScheduling):
    """A file, or files that share processes, go to one worker, in the order of the collection."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session")
def reused_redis() -> Iterator["ReusedRedis"]:
    """A private Redis for each test that asks for an empty one."""
    from tests.support.private_redis import ReusedRedis

    reused = ReusedRedis()
    yield reused
    reused.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator["RankProcesses"]:
    """Processes for cases of up to four ranks, which start within seconds once each."""
    from tests.support.decoder_ranks import RankProcesses  # loads torch

    processes = RankProcesses(4)
    yield processes
    processes.close()
