"""Clients that leave: a connection that sends a request and reads nothing, and the points at which it may leave."""

import json
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from tandem.cluster.fleet.engine_metrics import decode_stats
from tests.support.failover.calls import Call
from tests.support.failover.scene import HEAL_S, Scene
from tests.support.records import group_reports
from tests.support.service import Service, wait_for

PROMPT_TOKENS = 500
Wait = Callable[[], None]


@contextmanager
def connected(service: Service, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """The client leaves with the block."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as client:
        client.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        yield client


class Points:
    """Ways to bring a request of PROMPT_TOKENS tokens to a point and to know that it is there. Each is called before
    the request is sent, and returns a wait for it. fillers: requests that were sent for it; their clients stay, and
    num_waiting of them have no row."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.fillers: list[Call] = []
        self.num_waiting = 0

    def queued(self) -> Wait:
        """Behind requests that are held, one in each group."""
        faults, position = self._scene.faults, PROMPT_TOKENS + 100
        faults.hold_step(position)
        asked = {"model": "demo", "prompt": [9] * PROMPT_TOKENS, "max_tokens": 120, "return_token_ids": True}
        asked |= {"ignore_eos": True, "temperature": 0, "stream": True}
        while len(faults.held()) < 2:
            self.fillers.append(Call(self._scene.service, "/v1/completions", asked))
            wait_for(self._are_all_held, HEAL_S, "a group is held")
        self.num_waiting = self._count("waiting")

        def wait() -> None:
            wait_for(lambda: self._count("waiting") > self.num_waiting, HEAL_S, "it waits")

        return wait

    def _are_all_held(self) -> bool:
        """Whether both groups are held, or the one that is has all requests."""
        groups = {record.group for record in self._scene.held()}
        has_all = self._count("running", "waiting", groups=groups) == len(self.fillers)
        return len(groups) == 2 or (len(groups) == 1 and has_all)

    def tokenizing(self) -> Wait:
        self._scene.faults.hold_text()
        return self._until_held

    def adapter_load(self) -> Wait:
        self._scene.faults.hold_adapter()
        return self._until_held

    def prompt(self) -> Wait:
        self._scene.faults.hold_step(PROMPT_TOKENS - 1)
        return self._until_held

    def decoding(self) -> Wait:
        self._scene.faults.hold_step(PROMPT_TOKENS + 20)
        return self._until_held

    def swapped(self) -> Wait:
        """On its way back from host memory, to which more tokens than there is room for have pushed it."""
        self._scene.faults.hold_copy("load")
        return self._until_held

    def migrating(self) -> Wait:
        """In the next group, its first one lost."""
        faults = self._scene.faults
        faults.hold_step(PROMPT_TOKENS + 20)

        def wait() -> None:
            rank = faults.wait_held()
            os.kill(rank, signal.SIGKILL)
            wait_for(lambda: faults.held() - {rank}, HEAL_S, "it is in the other group")

        return wait

    def _until_held(self) -> None:
        self._scene.faults.wait_held()

    def _count(self, *names: str, groups: Collection[str] = ()) -> int:
        """Requests in these states, of some groups or of all."""
        found = [(r.group, decode_stats(r)) for r in group_reports(self._scene.service)]
        asked = [stats for group, stats in found if stats is not None and (not groups or group in groups)]
        return sum(getattr(stats, name) for stats in asked for name in names)
