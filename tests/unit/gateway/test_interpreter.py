"""What the interpreter takes from a gateway's event loop, in a process of its own."""

import subprocess
import sys

from tandem.cluster.gateway.app.interpreter import MOST_PUT_OFF, SWITCH_S

COLLECTIONS = """
import gc, sys
from tandem.cluster.gateway.app.interpreter import MOST_PUT_OFF, QuietCollections, give_way_soon

full = []
gc.callbacks.append(lambda phase, facts: full.append(facts["generation"]) if phase == "stop" else None)
busy = True
collections = QuietCollections(lambda: busy)
collections.begin()
give_way_soon()
parsed = [[] for _ in range(1_000_000)]
assert full and 2 not in full, "a full collection in the middle of work"
for _ in range(MOST_PUT_OFF):
    collections.look()
assert 2 not in full
collections.look()
assert full.count(2) == 1, "it is put off, not given up"
collections.look()
assert full.count(2) == 1, "and put off again"
busy = False
collections.look()
assert full.count(2) == 2
assert sys.getswitchinterval() < 0.001
"""


def test_full_collections_wait_for_a_quiet_moment() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert SWITCH_S < 0.005 and MOST_PUT_OFF > 0
