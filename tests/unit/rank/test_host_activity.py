"""HostActivity of this very process, its threads and another's clock: who waits is told from who computes."""

import hashlib
import sys
import threading

import pytest

from tandem.workers.rank.host_activity import IDLE_SHARE, HostActivity, thread_states
from tests.support.service import wait_for

DATA = bytes(2**22)


class Clocks:
    def __init__(self) -> None:
        self.now_s = self.used_s = 0.0

    def pass_s(self, seconds: float, share: float) -> None:
        self.now_s += seconds
        self.used_s += share * seconds


@pytest.mark.parametrize(
    ("share", "states", "computes"), [(0, "S", False), (0.9, "S", True), (0, "SR", True), (0, "D", True)]
)
def test_time_of_a_core_and_threads_that_want_some_count(share: float, states: str, computes: bool) -> None:
    clocks = Clocks()
    host = HostActivity(lambda: clocks.now_s, lambda: clocks.used_s, lambda: states)
    for _ in range(3):
        clocks.pass_s(1.0, share + IDLE_SHARE / 2)
        assert host.computes() == computes


def test_what_was_used_before_the_last_question_does_not_count() -> None:
    clocks = Clocks()
    host = HostActivity(lambda: clocks.now_s, lambda: clocks.used_s, lambda: "")
    clocks.pass_s(100.0, 1.0)
    assert host.computes()
    clocks.pass_s(1.0, 0.0)
    assert not host.computes()


def test_a_thread_that_computes_is_seen_while_it_does() -> None:
    """hashlib lets go of the interpreter lock, as torch does."""
    host, over = HostActivity(), threading.Event()

    def compute() -> None:
        while not over.is_set():
            hashlib.sha256(DATA).digest()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for _ in range(5):
            wait_for(host.computes, 30, "it computes")
        if sys.platform == "linux":
            wait_for(lambda: "R" in thread_states(), 30, "it runs, or would")
    finally:
        over.set()
        thread.join()
    wait_for(lambda: not host.computes(), 30, "only the thread that asks is running")
