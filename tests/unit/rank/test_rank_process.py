"""The garbage collector while a rank is imported."""

import gc
import importlib
import subprocess
import sys

import pytest

from tandem.workers.executor.rank_process import no_collections

AFTER = """
import gc
from tandem.workers.executor.rank_process import no_collections

counts = []
gc.callbacks.append(lambda phase, info: counts.append(phase))
with no_collections():
    assert not gc.isenabled()
    import {module}
print(len(counts), gc.isenabled(), gc.get_freeze_count())
"""


def test_what_is_imported_is_walked_neither_meanwhile_nor_later():
    module = "tandem.workers.rank.rank_server"
    code = AFTER.format(module=module)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    collections, enabled, frozen = ran.stdout.split()
    assert (collections, enabled) == ("0", "True")
    assert int(frozen) > 100_000


def test_a_failed_import_leaves_the_collector_at_work():
    with pytest.raises(ModuleNotFoundError), no_collections():
        importlib.import_module("a_module_that_is_not_there")
    assert gc.isenabled()
