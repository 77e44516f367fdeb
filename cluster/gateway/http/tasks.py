"""Tasks with an owner: the gateway's background tasks, ended with the app.

A request's owner task lives here, so that a cancelled HTTP handler never has to await a release. No global state.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

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
