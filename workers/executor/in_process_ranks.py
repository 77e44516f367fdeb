"""The only rank of a group in the calling process: no process, no socket, no serialization. Loads torch.

For offline work, tests and benchmarks. Steps run on the caller's thread, in poll(); only lanes have threads.
"""

import queue
from collections import deque
from collections.abc import Iterator

from tandem.configs.schema import EngineSettings
from tandem.workers.executor.rank_channel import Unreachable
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.messages.errors import GroupLost, SettingsError
from tandem.workers.messages.handshake import AllocateKV, FindModel, FromRank, RankSetup, Shutdown, ToRank
from tandem.workers.messages.step import CountExperts, StepPlan
from tandem.workers.rank.rank_server import RankServer


def in_process_group(settings: EngineSettings) -> RankGroup:
    """Returns an executor with one rank, not started. It sets torch's thread count for this process, as a rank process
    would."""
    if settings.parallel.ranks_per_group != 1:
        raise SettingsError(
            "one process holds one rank; more need processes of their own or a cluster", "--tensor-parallel-size"
        )
    rank = InProcessRank()
    return RankGroup(settings, rank, channel=rank)


class InProcessRank:
    """RankLauncher of one rank and RankChannel to it. Messages wait until receive() takes them to the rank; transfers
    go to its lanes at once."""

    def __init__(self) -> None:
        self.server: RankServer | None = None
        self._to_rank: deque[ToRank] = deque()
        self._from_rank: queue.SimpleQueue[FromRank] = queue.SimpleQueue()
        self._broken: str | None = None

    # ---- RankLauncher ----

    def start(self, rank: int, endpoint: str, secret: str) -> None:
        del endpoint, secret
        self.server = RankServer(rank, self._from_rank.put, self._from_rank.put)
        self._from_rank.put(self.server.hello)

    def lost(self) -> str | None:
        """The reason why a step failed, or receive() was interrupted."""
        return self._broken

    def kill(self, grace_s: float) -> None:
        del grace_s
        if self.server is not None:
            self.server.close()

    # ---- RankChannel ----

    def send(self, rank: int, message: ToRank) -> None:
        assert self.server is not None, "before start()"
        if self._broken is not None:
            raise Unreachable(self._broken)
        if isinstance(message, FindModel | RankSetup | AllocateKV | StepPlan | CountExperts):
            self._to_rank.append(message)
        elif not isinstance(message, Shutdown):  # kill() comes next
            self._take(message)

    def receive(self, timeout_s: float) -> FromRank | None:
        """Returns what the rank has said; else runs the next message, or waits for the lanes.

        Errors of the handshake are raised as they are, GroupLost when a step fails.
        """
        try:
            while self._from_rank.empty() and self._to_rank:
                self._take(self._to_rank.popleft())
            if self._from_rank.empty() and self.server is not None and self.server.is_computing:
                self._put(self.server.finish_step(), is_step=True)
            return self._from_rank.get(timeout=timeout_s)
        except queue.Empty:
            return None
        except BaseException as error:
            if not isinstance(error, Exception):
                self._break(error)  # interrupted: a message may be in neither queue, and the rank lacks it
            raise

    def close(self) -> None:
        self._to_rank.clear()

    # ---- inside ----

    def _take(self, message: ToRank) -> None:
        assert self.server is not None
        self._put(self.server.take(message), is_step=isinstance(message, StepPlan))

    def _put(self, answers: Iterator[FromRank], is_step: bool) -> None:
        try:
            for answer in answers:
                self._from_rank.put(answer)
        except Exception as error:
            if not is_step:
                raise
            raise GroupLost(self._break(error)) from error

    def _break(self, error: BaseException) -> str:
        """Ends the rank's work; returns the reason."""
        self._broken = f"{type(error).__name__}: {error}"
        self._to_rank.clear()
        return self._broken
