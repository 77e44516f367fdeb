"""The rank's loop: done results go out before the next plan is launched, a plan that is there is launched before a
result is waited for."""

from typing import Any

import msgspec
import pytest

from tandem.workers.messages.handshake import Shutdown
from tandem.workers.messages.step import StepPlan, StepResult
from tandem.workers.rank.rank_server import RankServer, _messages

LOOKS = 40


class Loop:
    """A socket and a runner that note what is asked of them, in order. done_at: how many launches it takes until a
    step is done, or LOOKS looks; waiting: plans that are there before the first is received; arrives_at: the look at
    which all others are."""

    def __init__(self, plans: int, waiting: int, done_at: int, arrives_at: int) -> None:
        self.messages: list[Any] = [StepPlan(step_id=number, work=[]) for number in range(1, plans + 1)]
        self.waiting, self.done_at, self.arrives_at, self.looks = waiting, done_at, arrives_at, 0
        self.received = self.launched = 0
        self.log: list[str] = []

    def poll(self, timeout: int) -> int:
        return int(self.received < self.waiting or (bool(self.messages) and self.looks >= self.arrives_at))

    def recv(self) -> bytes:
        self.received += 1
        return msgspec.msgpack.encode(self.messages.pop(0) if self.messages else Shutdown())

    def send(self, result: StepResult) -> None:
        self.log.append(f"send {result.step_id}")

    def launch(self, plan: StepPlan) -> "Step":
        self.launched += 1
        self.log.append(f"launch {plan.step_id}")
        return Step(self, plan.step_id)

    def close(self) -> None: ...


class Step:
    def __init__(self, loop: Loop, number: int) -> None:
        self.loop, self.number = loop, number

    def is_done(self) -> bool:
        self.loop.looks += 1
        return self.loop.launched >= self.number + self.loop.done_at or self.loop.looks % LOOKS == 0

    def result(self) -> StepResult:
        return StepResult(step_id=self.number, rows=[])


@pytest.mark.parametrize(
    ("waiting", "done_at", "arrives_at", "log"),
    [
        (9, 0, 9999, "launch 1, send 1, launch 2, send 2, launch 3, send 3"),
        (3, 1, 9999, "launch 1, launch 2, send 1, launch 3, send 2, send 3"),
        (0, 1, 9999, "launch 1, send 1, launch 2, send 2, launch 3, send 3"),
        (1, 1, 5, "launch 1, launch 2, send 1, launch 3, send 2, send 3"),
    ],
    ids=["cpu", "two overlap", "no plan is there", "a plan comes amid a step"],
)
def test_order_of_launches_and_results(waiting: int, done_at: int, arrives_at: int, log: str) -> None:
    loop: Any = Loop(3, waiting, done_at, arrives_at)
    server = RankServer(0, lambda loading: None, lambda result: None)
    server._runner = loop
    for message in _messages(loop, server, loop.send):
        for answer in server.take(message):
            loop.send(answer)
    assert ", ".join(loop.log) == log
