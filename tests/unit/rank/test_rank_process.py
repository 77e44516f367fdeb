"""The garbage collector and the threads while a rank is imported."""

import gc
import importlib
import os
import subprocess
import sys

import pytest

from tandem.workers.executor.rank_process import rank_imports

AFTER = """
import gc, os
from tandem.workers.executor.rank_process import rank_imports

counts = []
gc.callbacks.append(lambda phase, info: counts.append(phase))
with rank_imports():
    assert not gc.isenabled()
    import {module}
print(len(counts), gc.isenabled(), gc.get_freeze_count(), len(os.sched_getaffinity(0)))
"""


def test_what_is_imported_is_walked_neither_meanwhile_nor_later_and_binds_no_thread():
    """A shell may bind threads: then a process that has imported torch has one core for its main thread."""
    module = "tandem.workers.rank.rank_server"
    command = [sys.executable, "-c", AFTER.format(module=module)]
    env = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env)
    collections, enabled, frozen, cores = ran.stdout.split()
    assert int(cores) == len(os.sched_getaffinity(0))
    assert (collections, enabled) == ("0", "True")
    assert int(frozen) > 100_000


def test_a_failed_import_leaves_the_collector_at_work(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ})
    with pytest.raises(ModuleNotFoundError), rank_imports():
        importlib.import_module("a_module_that_is_not_there")
    assert gc.isenabled()
