"""Ends coordinators that live and do nothing: stopped (SIGSTOP, a paused container), hung, on a machine that is gone.

Every gateway checks after each read of the fleet. A group is suspected when its record has expired while Redis answers.
One on this machine that is seen stopped, without having run in between, for some seconds is killed; any other gets a
call through Ray, and is ended through Ray when it does not answer, which works across machines and takes 5 s more.
Serve then replaces the group. What it had moves before that (ServeDispatch.look_after): calls to a machine that is gone
fail only minutes later. docs/decisions/004-step-progress.md has the bounds.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import psutil

from tandem.cluster.fleet.fleet_view import FleetView, GroupRecord
from tandem.cluster.wire.service_facts import COORDINATOR

log = logging.getLogger("ray.serve.tandem")
SUSPECT_AFTER_S = 8.0
"""Time after the record's end, which is 3 s after the last heartbeat: a short hang is left alone."""
STOPPED_S = 7.0
"""Time that it was stopped after the record's end, never running meanwhile: several short stops are left alone."""
ANSWER_S = 5.0
TITLE = "ray::"


class CoordinatorActors:
    """The coordinators' actors by their groups' names, from inside one of Serve's replicas. app: the application's
    name."""

    def __init__(self, app: str) -> None:
        self._app = app

    async def answers(self, group: str, timeout_s: float) -> bool:
        """False only when it lives, as far as Ray knows, and has not answered in time."""
        actor = await asyncio.to_thread(_actor, self._app, group)
        if actor is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await actor.__ray_ready__.remote()
        except TimeoutError:
            return False
        except Exception as error:  # Ray has several types for its death
            log.debug("group %s is gone: %s", group, error)
        return True

    async def end(self, group: str) -> None:
        """Kills it, if there is one."""
        import ray

        actor = await asyncio.to_thread(_actor, self._app, group)
        if actor is not None:
            await asyncio.to_thread(ray.kill, actor)


class HungGroups:
    """The watch of one gateway; all gateways may do the same at once. node: the id of its Ray node. Call check()
    repeatedly, close() at the end."""

    def __init__(
        self, fleet: FleetView, actors: CoordinatorActors, node: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node = node
        self._clock = clock
        self._stopped: dict[int, tuple[float, float]] = {}
        self._fleet = fleet
        self._actors = actors
        self._asking: dict[str, asyncio.Task[None]] = {}

    def close(self) -> None:
        """Cancels the calls in flight."""
        for task in self._asking.values():
            task.cancel()

    def check(self) -> None:
        """Checks every suspect once. Never waits."""
        for group in [g for g, task in self._asking.items() if task.done()]:
            del self._asking[group]
        stopped: dict[int, tuple[float, float]] = {}
        for record in self._fleet.missing_for():
            cpu_s = stopped_cpu_s(record.pid) if record.host == self._node else None
            if cpu_s is None:
                continue
            before_cpu_s, since_s = self._stopped.get(record.pid, (cpu_s, self._clock()))
            stopped[record.pid] = (cpu_s, since_s if before_cpu_s == cpu_s else self._clock())
            if self._clock() - stopped[record.pid][1] >= STOPPED_S and kill_stopped(record.pid):
                log.warning("the coordinator of group %s was stopped: it has been killed", record.group)
        self._stopped = stopped
        for record in self._fleet.missing_for(SUSPECT_AFTER_S):
            if record.pid not in stopped and record.group not in self._asking:
                self._asking[record.group] = asyncio.create_task(self._ask(record), name=f"ask {record.group}")

    async def _ask(self, record: GroupRecord) -> None:
        try:
            if not await self._actors.answers(record.group, ANSWER_S):
                log.warning("the coordinator of group %s does not answer: it is ended", record.group)
                await self._actors.end(record.group)
        except Exception as error:
            log.warning("group %s could not be asked: %s", record.group, error)
        await asyncio.sleep(ANSWER_S)  # before it is asked again


def _actor(app: str, group: str):  # type: ignore[no-untyped-def]
    """The handle of a group's replica; None when there is none any more. Blocks."""
    import ray

    try:
        return ray.get_actor(f"SERVE_REPLICA::{app}#{COORDINATOR}#{group}", namespace="serve")
    except ValueError:
        return None


def stopped_cpu_s(pid: int) -> float | None:
    """CPU seconds of a stopped coordinator; None when it runs, or the pid is another process's by now."""
    try:
        process = psutil.Process(pid)
        title = " ".join(process.cmdline())
        if not (title.startswith(TITLE) and COORDINATOR in title):
            return None
        if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return None
        times = process.cpu_times()
        return times.user + times.system
    except psutil.Error:
        return None


def kill_stopped(pid: int) -> bool:
    """Kills the process if it is a coordinator and stopped; SIGKILL works on stopped processes. True when it did."""
    if stopped_cpu_s(pid) is None:
        return False
    try:
        psutil.Process(pid).kill()
        return True
    except psutil.NoSuchProcess:
        return False
    except psutil.Error as error:
        log.warning("coordinator process %d cannot be ended: %s", pid, error)
        return False
