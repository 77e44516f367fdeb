"""RankServers of one group on threads of this process, behind its RankGroup: the messages of several ranks, whole
steps, pipelines and reductions included, without processes."""

import queue
import threading
from collections.abc import Generator
from typing import Any

from tandem.configs.schema import EngineSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.messages.handshake import FromRank, RankListening, RankSetup, Shutdown, ToRank
from tandem.workers.rank.rank_server import RankServer
from tests.support.thread_ranks import TIMEOUT_S, thread_contexts


class ThreadServers:
    """RankLauncher of the ranks and RankChannel to them."""

    def __init__(self, tp_size: int, pp_size: int) -> None:
        self._world, self._contexts = thread_contexts(tp_size, pp_size)
        self._said: queue.SimpleQueue[FromRank | BaseException] = queue.SimpleQueue()
        self._inboxes: list[queue.SimpleQueue[ToRank]] = [queue.SimpleQueue() for _ in self._contexts]
        self._threads: list[threading.Thread] = []

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        thread = threading.Thread(target=self._run, args=(rank,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def lost(self) -> str | None:
        return None

    def kill(self, grace_s: float) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a rank hangs"

    def send(self, rank: int, message: ToRank) -> None:
        self._inboxes[rank].put(message)

    def receive(self, timeout_s: float) -> FromRank | None:
        try:
            said = self._said.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(said, BaseException):
            raise said
        return said

    def close(self) -> None: ...

    def _run(self, rank: int) -> None:
        server: Any = RankServer(rank, self._said.put, self._said.put)
        server._meet = lambda setup, settings, backend: self._meet(rank, setup)
        self._said.put(server.hello)
        message: ToRank | None = None
        try:
            while not isinstance(message, Shutdown):
                message = self._inboxes[rank].get()
                for answer in server.take(message):
                    self._said.put(answer)
        except BaseException as error:
            self._said.put(error)
            self._world.desert()

    def _meet(self, rank: int, setup: RankSetup) -> Generator[FromRank, None, ParallelContext]:
        """The other ranks are there already."""
        if setup.master_port is None:
            yield RankListening(rank, 1)
        return self._contexts[rank]


def thread_group(settings: EngineSettings) -> RankGroup:
    """A group of such ranks, not started."""
    parallel = settings.parallel
    servers = ThreadServers(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return RankGroup(settings, servers, channel=servers)
