"""Every pair of request kind, death and phase, and losses that meet: `make chaos`. Writes docs/reliability-table.md."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

import pytest

from tandem.workers.engine.waiting.probation import PROBATION_TOKENS
from tests.support.failover import laws, table
from tests.support.failover.calls import Call
from tests.support.failover.kinds import KINDS
from tests.support.failover.scene import HEAL_S, TEST_S, Scene, failover_scene
from tests.support.mixed_requests import PROMPTS
from tests.support.pairwise import Row, all_pairs
from tests.support.records import group_records
from tests.support.service import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(TEST_S)]
DEATHS = ("rank", "rank 0", "coordinator", "last stage", "drain", "out of memory")
PHASES = ("prefill", "decode", "adapter load", "KV copy")
IN_A_COPY = "memory that runs out in a copy fails the copy, which is tried again or computed; no process ends"
VOID = {("out of memory", "adapter load"): IN_A_COPY, ("out of memory", "KV copy"): IN_A_COPY}


def shape_of(row: Row) -> tuple[str, ...]:
    """The flags of the service in which the row is played."""
    return ("-pp", "2") if row[1] == "last stage" else ("-tp", "2")


ROWS = all_pairs(tuple(KINDS), DEATHS, PHASES, is_possible=lambda row: row[1:] not in VOID)
CASES = [(shape_of(row), row) for row in sorted(ROWS, key=shape_of)]


class Scenes:
    """The scene of the last flags, until others are asked for: pytest would start one for each test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._flags: tuple[str, ...] = ()
        self._scene: Scene | None = None

    def scene(self, flags: tuple[str, ...], root: Path) -> Scene:
        if self._scene is None or self._flags != flags:
            self._scene = None
            self._stack.close()
            self._scene, self._flags = self._stack.enter_context(failover_scene(root, *flags)), flags
        return self._scene


@pytest.fixture(scope="module")
def scenes() -> Iterator[Scenes]:
    with ExitStack() as stack:
        yield Scenes(stack)


@pytest.fixture
def scene(request: pytest.FixtureRequest, scenes: Scenes, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scenes.scene(request.param, tmp_path_factory.mktemp("root"))


@pytest.mark.parametrize(("scene", "row"), CASES, indirect=["scene"], ids=lambda value: " ".join(value))
def test_no_pair_loses_a_request(scene: Scene, row: Row) -> None:
    kind, death, phase = row
    table.remove((kind, death, phase), VOID, len(ROWS))
    table.add(scene.play(KINDS[kind], death, phase), VOID, len(ROWS))


# ---- losses that meet ----


class Crowd:
    """64 greedy streams, and what each says undisturbed."""

    def __init__(self, scene: Scene, max_tokens: int = 80) -> None:
        plain = {"model": "demo", "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        self._scene = scene
        self._bodies = [{**plain, "prompt": prompt, "max_tokens": max_tokens} for prompt in PROMPTS]
        self._whole = [self._send(body).result() for body in self._bodies]
        self.calls: list[Call] = []

    def begin(self, count: int = 64) -> None:
        """So many more at once."""
        bodies = islice(cycle(self._bodies), len(self.calls), len(self.calls) + count)
        self.calls += [self._send(body) for body in bodies]

    def wait_for_tokens(self, more: int) -> None:
        """Until each has so many more, or is over."""
        for call, wanted in [(call, call.num_tokens + more) for call in self.calls]:
            call.wait_for_tokens(wanted)

    def check(self) -> None:
        """0 failed, and the laws."""
        whole = {tuple(call.body.items()): call for call in self._whole}
        for call in self.calls:
            laws.check_tokens(call.result(), whole[tuple(call.body.items())], is_exact=True)
        self._scene.wait_until_two_serve()
        laws.check_ledger(self._scene.service, self.calls, frozenset({"length"}))
        laws.check_kv(self._scene.service)
        laws.check_alive(self._scene.service, [], self._scene.known)

    def _send(self, body: dict[str, object]) -> Call:
        return Call(self._scene.service, "/v1/completions", body)


@pytest.mark.parametrize("scene", [("-tp", "2")], indirect=True, ids=" ".join)
def test_two_groups_lost_five_seconds_apart(scene: Scene) -> None:
    """The second one when nobody is examined any more for the first: who runs alone in it is convicted of its end."""
    scene.wait_until_two_serve()
    crowd = Crowd(scene, max_tokens=160)
    crowd.begin()
    first, second = scene.serving()
    crowd.wait_for_tokens(1)
    os.kill(scene.ranks(first)[0], signal.SIGKILL)
    time.sleep(5)  # that is what is tested
    crowd.wait_for_tokens(2 * PROBATION_TOKENS)
    os.kill(scene.ranks(second)[-1], signal.SIGKILL)
    crowd.check()


@pytest.mark.parametrize("scene", [("-tp", "2")], indirect=True, ids=" ".join)
def test_a_group_lost_while_the_other_one_is_taken_down(scene: Scene) -> None:
    """Until another one serves, all requests wait."""
    scene.wait_until_two_serve()
    scene.begin_one_after_the_other()
    crowd = Crowd(scene)
    crowd.begin()
    crowd.wait_for_tokens(1)
    leaving = scene.newest()
    (staying,) = [record for record in scene.serving() if record.group != leaving.group]
    scene.scale(1)
    os.kill(scene.ranks(staying)[0], signal.SIGKILL)
    wait_for(lambda: staying.group not in {r.group for r in scene.serving()}, HEAL_S, "it is lost")
    scene.scale(2)
    crowd.check()


ROWS_OF_A_GROUP, QUEUE_OF_A_GROUP = 8, 24
FULL = ("-tp", "2", "--max-num-seqs", str(ROWS_OF_A_GROUP), "--max-num-queued-reqs", str(QUEUE_OF_A_GROUP))


@pytest.mark.parametrize("scene", [FULL], indirect=True, ids=["small queues"])
def test_a_group_lost_while_the_other_ones_queue_is_full(scene: Scene) -> None:
    """More requests than both groups take: some get 429 at once. Then a group is lost, whose requests pass the limit of
    the other one's queue."""
    scene.wait_until_two_serve()
    crowd = Crowd(scene)
    scene.faults.hold_any_step()
    crowd.begin(2 * (ROWS_OF_A_GROUP + QUEUE_OF_A_GROUP) + 16)
    wait_for(lambda: waiting(scene) == [QUEUE_OF_A_GROUP] * 2, HEAL_S, "both queues are full")
    wait_for(lambda: accepted(scene) + ended(crowd) == len(crowd.calls), HEAL_S, "the rest is refused")
    refused = [call for call in crowd.calls if call.is_over]
    assert {call.status for call in refused} == {429}
    crowd.calls = [call for call in crowd.calls if call not in refused]
    os.kill(scene.ranks(scene.serving()[0])[0], signal.SIGKILL)
    scene.faults.release()
    crowd.check()


def waiting(scene: Scene) -> list[int]:
    return [record.waiting for record in group_records(scene.service)]


def accepted(scene: Scene) -> int:
    return sum(record.waiting + record.running for record in group_records(scene.service))


def ended(crowd: Crowd) -> int:
    return sum(call.is_over for call in crowd.calls)
