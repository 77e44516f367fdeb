"""Text work off the event loop: parsing, checking, rendering and tokenizing what clients send.

Small work runs at once. The rest waits for one of a few threads, in an order that is fair between tenants: next is the
tenant that was served the least, by bytes. Large work never takes the last thread, so that small work does not wait for
seconds of somebody else's.
"""

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from tandem.workers.messages.errors import RequestRefused

P = ParamSpec("P")
T = TypeVar("T")
INLINE_BYTES = 4096
LARGE_BYTES = 64 * 1024
LEAST_COST = 1024
MOST_IDLE = 1000
"""Tenants of which what they were served is kept although they have no more to wait for it than others."""


class Meter(Protocol):
    """Counter of text work."""

    def text_worked(self, tenant: str, cpu_s: float, *, waited_s: float | None) -> None:
        """One piece was done, in cpu_s seconds of a thread. waited_s: in the queue; None: it was done at once."""
        ...


class Unmetered:
    """A Meter that counts nothing."""

    def text_worked(self, tenant: str, cpu_s: float, *, waited_s: float | None) -> None:
        """Forgets it."""


class _Job(Generic[T]):
    """A piece of work in the queue. size: bytes. arrived_s: on the queue's clock."""

    def __init__(self, tenant: str, size: int, work: Callable[[], T], arrived_s: float) -> None:
        self.tenant = tenant
        self.cost = max(size, LEAST_COST)
        self.is_large = size >= LARGE_BYTES
        self.work = work
        self.arrived_s = arrived_s
        self.done: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class TextWorkers:
    """The threads and their queue. Used on one event loop; needs no loop until the first run()."""

    def __init__(
        self,
        threads: int = 2,
        timeout_s: float = 30.0,
        meter: Meter = Unmetered(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tandem-text")
        self._threads = threads
        self._timeout_s = timeout_s
        self._meter = meter
        self._clock = clock
        self._waiting: dict[tuple[str, bool], deque[_Job[Any]]] = {}
        self._served: dict[str, float] = {}
        self._now = 0.0  # what the tenant that began last had been served
        self._running: set[_Job[Any]] = set()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Pieces of work in the queue."""
        return sum(map(len, self._waiting.values()))

    @property
    def is_busy(self) -> bool:
        """True while there is work on a thread, or in the queue."""
        return bool(self._running or self._waiting)

    async def run(self, tenant: str, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns function(...)'s result. size: bytes of text that it works on. RequestRefused 503 when the result is
        not there in time; work that has not begun by then is dropped. Work on no text is done at once, and not
        counted."""
        if size == 0:
            return function(*args, **kwargs)
        if size < INLINE_BYTES:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._meter.text_worked(tenant, time.thread_time() - began_s, waited_s=None)
        if self._is_closed:
            raise closing()
        job = _Job(tenant, size, partial(function, *args, **kwargs), self._clock())
        self._waiting.setdefault((tenant, job.is_large), deque()).append(job)
        self._start_next()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await job.done
        except TimeoutError:
            message = "The prompt could not be tokenized in time."
            raise RequestRefused(message, code="service_unavailable", status=503) from None
        finally:
            self._forget(job)
            del job  # its error's frames refer to it, in a circle

    def close(self) -> None:
        """Refuses what waits and what comes; running work ends by itself."""
        self._is_closed = True
        for job in [job for lane in self._waiting.values() for job in lane]:
            if not job.done.done():
                job.done.set_exception(closing())
                job.done.exception()  # its handler may have gone
        self._waiting.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- inside ----

    def _start_next(self) -> None:
        while len(self._running) < self._threads and (job := self._next()) is not None:
            self._now = max(self._now, self._served.get(job.tenant, 0.0))
            self._served[job.tenant] = self._now + job.cost
            self._running.add(job)
            waited_s = self._clock() - job.arrived_s
            worker = asyncio.get_running_loop().run_in_executor(self._pool, _timed, job.work)
            worker.add_done_callback(partial(self._ended, job, waited_s))

    def _next(self) -> _Job[Any] | None:
        """Takes the first job of the tenant that was served the least, of equals the one that came first. Who was idle
        has no credit: its time begins where that of the one that began last does (_start_next)."""
        may_be_large = sum(job.is_large for job in self._running) < max(1, self._threads - 1)
        lanes = [lane for lane in self._waiting if may_be_large or not lane[1]]
        if not lanes:
            return None
        lane = min(lanes, key=lambda lane: (self._served.get(lane[0], 0.0), self._waiting[lane][0].arrived_s))
        job = self._waiting[lane].popleft()
        if not self._waiting[lane]:
            del self._waiting[lane]
        return job

    def _ended(self, job: _Job[Any], waited_s: float, worker: "asyncio.Future[tuple[Any, float]]") -> None:
        self._running.discard(job)
        if worker.cancelled():
            job.done.cancel()
        else:
            outcome, cpu_s = worker.result()
            self._meter.text_worked(job.tenant, cpu_s, waited_s=waited_s)
            if job.done.done():
                pass  # nobody waits any more
            elif isinstance(outcome, _Raised):
                job.done.set_exception(outcome.error)
            else:
                job.done.set_result(outcome)
        if not self._running and not self._waiting:
            self._served.clear()  # equal again
            self._now = 0.0
        elif len(self._served) > MOST_IDLE:
            waiting = {tenant for tenant, _ in self._waiting}
            self._served = {t: s for t, s in self._served.items() if s > self._now or t in waiting}
        self._start_next()

    def _forget(self, job: _Job[Any]) -> None:
        """Takes a job that nobody waits for out of the queue."""
        if (lane := self._waiting.get((job.tenant, job.is_large))) is not None and job in lane:
            lane.remove(job)
            if not lane:
                del self._waiting[job.tenant, job.is_large]


def closing() -> RequestRefused:
    """The refusal of work that comes after the end."""
    return RequestRefused("The gateway is shutting down.", code="service_unavailable", status=503)


class _Raised:
    """An exception on its way to the loop."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def _timed(work: Callable[[], T]) -> tuple[T | _Raised, float]:
    """The result, or what was raised, and the CPU time that it took."""
    began_s = time.thread_time()
    outcome: T | _Raised
    try:
        outcome = work()
    except Exception as error:
        outcome = _Raised(_without_frames(error))
    return outcome, time.thread_time() - began_s


def _without_frames(error: Exception) -> Exception:
    """Returns the error without what it holds in memory, such as a parsed body in a frame that it has passed: in a
    circle with its frames it would stay until the garbage collector comes, which may be gigabytes later."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        if isinstance(link, RequestRefused):
            link.__context__ = None  # JSONDecodeError, for one, has all of the text
        link = link.__context__
    assert error.__traceback__ is not None
    return error.with_traceback(error.__traceback__.tb_next)
