"""ProbeSilence against a clock of the test's own; ProbeWatch and the ranks' echo over real sockets and processes."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.workers.executor.liveness import DOUBTFUL_AFTER_S, FROZEN_AFTER_S, PERIOD_S, ProbeSilence, ProbeWatch
from tandem.workers.messages.channel import ChannelContext, bind_router, new_secret
from tandem.workers.rank.rank_watch import start_echo
from tests.support.service import wait_for

AFTER_S = 2.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_rank_counts_from_its_first_answer() -> None:
    clock = Clock()
    silence = ProbeSilence(clock)
    for _ in range(100):
        clock.now_s += PERIOD_S
        silence.tick()
    assert silence.longest() == (0.0, b""), "a rank that still imports torch is not frozen"
    silence.answered(b"0")
    assert silence.longest() == (0.0, b"0")


def test_the_longest_silence_is_the_one_that_counts() -> None:
    clock = Clock()
    silence = ProbeSilence(clock)
    silence.answered(b"0")
    silence.answered(b"1")
    turns = 0
    while silence.longest()[0] <= FROZEN_AFTER_S:
        clock.now_s += PERIOD_S
        silence.tick()
        silence.answered(b"0")
        turns += 1
    assert silence.longest() == (FROZEN_AFTER_S + PERIOD_S, b"1")
    assert turns * PERIOD_S <= FROZEN_AFTER_S + PERIOD_S


def test_time_in_which_the_coordinator_itself_was_stopped_is_nobodys_silence() -> None:
    clock = Clock()
    silence = ProbeSilence(clock)
    silence.answered(b"0")
    for _ in range(3):
        clock.now_s += 3600  # stopped, and on once more
        silence.tick()
        assert silence.longest()[0] < FROZEN_AFTER_S
        silence.answered(b"0")  # its answer had been waiting
        assert silence.longest()[0] == 0.0


class Watched:
    """A watch with one echo, in this process or in one that can be stopped."""

    def __init__(self, after_s: float) -> None:
        self.context = ChannelContext()
        self.secret = new_secret()
        self.said: list[tuple[str, float]] = []
        self.heard = threading.Event()
        self.watch = ProbeWatch(self.context, self.secret, "127.0.0.1", self._note, after_s)

    def _note(self, message: str) -> None:
        self.said.append((message, time.monotonic()))
        self.heard.set()

    def until_heard(self) -> None:
        deadline_s = time.monotonic() + 30
        while not self.watch._silence.ranks():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@contextmanager
def watched(after_s: float = AFTER_S) -> Iterator[Watched]:
    made = Watched(after_s)
    try:
        yield made
    finally:
        made.context.term()


def test_an_echo_answers_while_the_interpreter_lock_is_held() -> None:
    with watched() as w:
        context = ChannelContext()
        start_echo(context, w.secret, w.watch.endpoint, 0)
        w.until_heard()
        # Naps without letting go of the lock: no Python thread of this process runs meanwhile, the watch included.
        for _ in range(4):
            ctypes.PyDLL(None).usleep(700_000)
            time.sleep(PERIOD_S)
        assert not w.heard.is_set()
        assert w.watch.silent_s() == 0.0
        context.term()
        assert w.heard.wait(AFTER_S + 30)
        assert "rank 0 has given no sign of life" in w.said[0][0]


ECHO = """
import sys, zmq
from tandem.workers.rank.rank_watch import start_echo
start_echo(zmq.Context(), sys.argv[1], sys.argv[2], 3)
while True:
    {body}
"""


@contextmanager
def echo_process(w: Watched, body: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", ECHO.format(body=body), w.secret, w.watch.endpoint])
    try:
        w.until_heard()
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_process_that_is_stopped_is_frozen_and_one_that_computes_is_not() -> None:
    with watched() as w, echo_process(w, "pow(7, 10**6)  # never leaves C for long, never sleeps") as process:
        assert not w.heard.wait(2 * AFTER_S)
        stopped_s = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        assert w.heard.wait(AFTER_S + 30)
        message, at_s = w.said[0]
        assert at_s - stopped_s >= AFTER_S - PERIOD_S
        assert message.startswith("rank 3 ")


def test_a_short_stop_is_forgiven_and_shows_meanwhile() -> None:
    with watched(FROZEN_AFTER_S) as w, echo_process(w, "import time; time.sleep(1)") as process:
        os.kill(process.pid, signal.SIGSTOP)
        deadline_s = time.monotonic() + 2 * DOUBTFUL_AFTER_S + 30
        while w.watch.silent_s() < DOUBTFUL_AFTER_S:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGCONT)
        while w.watch.silent_s() > 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert not w.said


def test_a_rank_says_that_it_is_cut_off_and_that_it_is_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    context, secret = ChannelContext(), new_secret()
    router, endpoint = bind_router(context, secret)
    start_echo(context, secret, endpoint, 2, unprobed_s=0.2)
    assert router.recv_multipart() == [b"2", b""]
    for said in ("rank 2: no probe for 0.2 s", "rank 2 is probed again"):
        router.send_multipart([b"2", b"?"])
        assert router.recv_multipart() == [b"2", b"?"]
        wait_for(lambda said=said: said in caplog.text, 30, f"it says {said!r}")  # type: ignore[misc]
    router.close(linger=0)
    context.term()
