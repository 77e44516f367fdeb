"""HostActivity of this very process and on clocks of the test's own: who waits is told from who computes."""

import hashlib
import sys
import threading

import pytest

from tandem.workers.rank.rank_watch import IDLE_SHARE, HostActivity, thread_states
from tests.support.service import wait_for

DATA = bytes(2**22)
OTHER = -1
"""Another thread than the step's."""


class Clocks:
    """A host whose step's thread is the test's, and its clocks."""

    def __init__(self, states: dict[int, str]) -> None:
        self.now_s = self.used_s = 0.0
        self.host = HostActivity(lambda: self.now_s, lambda: self.used_s, lambda: states)

    def computes(self, seconds: float, share: float, is_exchanging: bool = False) -> bool:
        self.now_s += seconds
        self.used_s += share * seconds
        return self.host.computes(is_exchanging)


@pytest.mark.parametrize(
    ("share", "step", "other", "is_exchanging", "computes"),
    [
        (0.0, "S", "S", False, False),
        (0.9, "S", "S", False, True),
        (0.9, "S", "S", True, True),  # it sums, or sends much
        (0.0, "R", "S", False, True),
        (0.0, "R", "S", True, False),  # it looks whether others have come
        (0.0, "S", "R", False, False),
        (0.0, "S", "D", True, True),
    ],
)
def test_time_of_a_core_and_threads_that_want_some_count(
    share: float, step: str, other: str, is_exchanging: bool, computes: bool
) -> None:
    clocks = Clocks({threading.get_native_id(): step, OTHER: other})
    for _ in range(3):
        assert clocks.computes(1.0, share + IDLE_SHARE / 2, is_exchanging) == computes


def test_what_was_used_before_the_last_question_does_not_count() -> None:
    clocks = Clocks({})
    assert clocks.computes(100.0, 1.0)
    assert not clocks.computes(1.0, 0.0)


def test_a_thread_that_computes_is_seen_while_it_does() -> None:
    """hashlib lets go of the interpreter lock, as torch does."""
    made, over = list[HostActivity](), threading.Event()

    def compute() -> None:
        made.append(HostActivity())
        while not over.is_set():
            hashlib.sha256(DATA).digest()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        (host,) = wait_for(lambda: made, 30, "it has begun")
        for _ in range(5):
            wait_for(host.computes, 30, "it computes")
        if sys.platform == "linux":
            wait_for(lambda: thread_states()[thread.native_id or 0] == "R", 30, "it runs, or would")
    finally:
        over.set()
        thread.join()
    # Questions far apart: each takes some time of a core itself, more where earlier tests have left threads to look at.
    wait_for(lambda: not host.computes(), 60, "only the thread that asks is running", period_s=1.0)
