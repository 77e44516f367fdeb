"""Ranks of a group as threads of this process, which talk through its memory: for tests that run many short histories.

`call` is that of RankProcesses. When one rank raises, the others come out of their collectives with Deserted.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from tandem.parallel.context import ParallelContext
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.parallel.mesh import Mesh

TIMEOUT_S = 60.0


class Deserted(Exception):
    """A peer has ended."""


class Sent:
    """A send that is over."""

    def wait(self) -> None: ...


class ThreadGroup:
    """What some threads share: a barrier, a place for each one's tensor, and a queue for each pair."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._places: list[Any] = [None] * size
        self._queues: defaultdict[tuple[int, int], queue.SimpleQueue[Any]] = defaultdict(queue.SimpleQueue)

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        """Everybody's, in rank order."""
        try:
            self._places[rank] = mine
            self._barrier.wait()
            everybodys = list(self._places)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise Deserted from None
        return everybodys

    def pass_on(self, source: int, target: int, what: Any) -> None:
        self._queues[source, target].put(what)

    def take(self, source: int, target: int) -> Any:
        what = self._queues[source, target].get(timeout=TIMEOUT_S)
        if what is None:
            raise Deserted
        return what

    def desert(self) -> None:
        self._barrier.abort()
        for source in range(self.size):
            for target in range(self.size):
                self._queues[source, target].put(None)


class ThreadCollectives:
    """One thread's Collectives. No operation of theirs counts as the rank's own."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return tensor.copy_(torch.stack(self._group.exchange(self._rank, tensor.clone())).sum(0))

    def all_gather(self, parts_R: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            return parts_R.copy_(torch.stack(self._group.exchange(self._rank, tensor.clone())))

    def gather(self, parts_R: torch.Tensor | None, tensor: torch.Tensor) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            parts = torch.stack(self._group.exchange(self._rank, tensor.clone()))
            if parts_R is not None:
                parts_R.copy_(parts)

    def isend(self, tensor: torch.Tensor, peer: int) -> Sent:
        with torch.utils._python_dispatch._disable_current_modes():
            self._group.pass_on(self._rank, peer, tensor.clone())
        return Sent()

    def recv(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        sent = self._group.take(peer, self._rank)
        with torch.utils._python_dispatch._disable_current_modes():
            assert sent.shape == tensor.shape and sent.dtype == tensor.dtype
            return tensor.copy_(sent)

    def close(self) -> None: ...


def thread_contexts(tp_size: int, pp_size: int) -> tuple[ThreadGroup, list[ParallelContext]]:
    """The contexts of a group's ranks, and the group of all of them."""
    world, stages = ThreadGroup(tp_size * pp_size), [ThreadGroup(tp_size) for _ in range(pp_size)]
    world_desert = world.desert

    def desert() -> None:
        world_desert()
        for stage in stages:
            stage.desert()

    world.desert = desert  # type: ignore[method-assign]
    contexts = []
    for rank in range(tp_size * pp_size):
        mesh = Mesh(tp_size, pp_size, rank)
        tp = StepCollectives(ThreadCollectives(stages[mesh.pp_rank], mesh.tp_rank), tp_size, mesh.tp_rank)
        contexts.append(ParallelContext(mesh, tp, ThreadCollectives(world, rank)))
    return world, contexts


class ThreadRanks:
    """Calls functions on a thread for each rank."""

    def call(self, function: Callable[..., Any], tp_size: int, pp_size: int, *arguments: Any) -> list[Any]:
        """function(*arguments, context, share) on every rank; the results in rank order. share(what): everybody's, in
        rank order. Raises the first rank's error."""
        world, contexts = thread_contexts(tp_size, pp_size)
        results: list[Any] = [None] * len(contexts)
        errors: list[BaseException] = []

        def run(context: ParallelContext) -> None:
            try:
                results[context.rank] = function(*arguments, context, lambda what: world.exchange(context.rank, what))
            except BaseException as error:
                errors.append(error)
                world.desert()

        threads = [threading.Thread(target=run, args=(context,), daemon=True) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise next((error for error in errors if not isinstance(error, Deserted)), errors[0])
        return results
