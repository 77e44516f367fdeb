"""One run of a load: sends each request when it is due, waits for all answers, or until Ctrl-C."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from tandem.cluster.cli.bench.load_client import LoadClient, LoadRequest, Outcome

READY_RETRY_S = 1.0


@dataclass(frozen=True)
class LoadResult:
    """The end of a load. outcomes: in the order of the requests, without those that Ctrl-C ended, of which there
    are `unfinished`. duration_s: from the first request to the last answer."""

    outcomes: Sequence[Outcome]
    duration_s: float
    unfinished: int = 0


async def run_load(
    client: LoadClient,
    requests: Sequence[LoadRequest],
    due_s: Sequence[float],
    max_concurrency: int | None,
    on_end: Callable[[], object],
) -> LoadResult:
    """Sends every request `due_s` seconds after the begin, at most max_concurrency at a time. on_end: called at the end
    of each answer. A first Ctrl-C ends the run with what has come so far."""
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    outcomes: list[Outcome | None] = [None] * len(requests)

    async def answer(place: int) -> None:
        arrived_s = perf_counter()
        async with places:
            outcome = await client.send(requests[place])
        outcome.queue_s = outcome.start_s - arrived_s
        outcomes[place] = outcome
        on_end()

    async def send_all() -> None:
        async with asyncio.TaskGroup() as answers:
            for place, time_s in enumerate(due_s):
                if (wait_s := began_s + time_s - perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                answers.create_task(answer(place))

    began_s = perf_counter()
    with _stopped_by_ctrl_c() as stopped:
        sending = asyncio.create_task(send_all())
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait((sending, stopping), return_when=asyncio.FIRST_COMPLETED)
        duration_s = perf_counter() - began_s
        stopping.cancel()
        if not sending.done():
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending
        else:
            await sending  # raises what was not foreseen
    done = [outcome for outcome in outcomes if outcome is not None]
    return LoadResult(done, duration_s, len(requests) - len(done))


async def wait_until_ready(client: LoadClient, request: LoadRequest, timeout_s: float) -> str | None:
    """Sends a request, again and again for timeout_s at most, until it is answered; returns why it was not."""
    deadline_s = perf_counter() + timeout_s
    while (outcome := await client.send(request)).error is not None and perf_counter() < deadline_s:
        await asyncio.sleep(min(READY_RETRY_S, max(0.0, deadline_s - perf_counter())))
    return outcome.error


@contextlib.contextmanager
def _stopped_by_ctrl_c() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets; the next one interrupts as usual. Outside the main thread, which alone gets
    signals, nothing sets it."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stopped.set()

    with contextlib.suppress(ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        with contextlib.suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
