"""Tasks with an owner: the gateway's background tasks, ended with the app; and awaitables that need no task.

A request's owner task lives here, so that a cancelled HTTP handler never has to await a release. No global state.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger("tandem.gateway")


class TaskOwner:
    """Starts tasks, keeps them alive, logs what they raise, and ends with them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """A running task that is kept until it is done."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait_idle(self, timeout_s: float) -> bool:
        """True when every task has ended within timeout_s."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def close(self, timeout_s: float) -> None:
        """Waits for the tasks, then cancels what is left."""
        if not await self.wait_idle(timeout_s):
            left = list(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            log.debug("task %s ended with %s", task.get_name(), type(error).__name__)


class Aside(Generic[T]):
    """A coroutine that the task of its owner advances between its other waits.

    wake: is called, from the loop, when the coroutine can go on; the owner's task then calls advance(). The coroutine
    may not cancel the task that runs it, as asyncio.timeout() does: that task waits elsewhere meanwhile.
    """

    def __init__(self, work: Coroutine[Any, Any, T], wake: Callable[[], None]) -> None:
        self.is_over = False
        self._work = work
        self._wake = wake
        self._waits_for: asyncio.Future[Any] | None = None
        self._result: T | None = None

    def advance(self) -> T | None:
        """Runs the coroutine as far as it comes without waiting. Returns its result once it is over, and None before;
        raises what it raises."""
        while not self.is_over and (self._waits_for is None or self._waits_for.done()):
            try:
                self._waits_for = self._work.send(None)
            except StopIteration as end:
                self.is_over, self._result = True, end.value
            except BaseException:
                self.is_over = True
                raise
            else:
                if self._waits_for is not None:  # as a Task does, so that others may await it too
                    self._waits_for._asyncio_future_blocking = False
                self._be_woken()
                if self._waits_for is None:
                    break  # it lets others run first
        return self._result

    def close(self) -> None:
        """Ends the coroutine where it waits. What it waits for goes on. Idempotent."""
        self.is_over = True
        if self._waits_for is not None:
            self._waits_for.remove_done_callback(self._on_done)
        self._work.close()

    def _be_woken(self) -> None:
        if self._waits_for is None:
            asyncio.get_running_loop().call_soon(self._wake)
        else:
            self._waits_for.add_done_callback(self._on_done)

    def _on_done(self, _: object) -> None:
        self._wake()
