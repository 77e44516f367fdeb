"""Time that passes at once for the running loop: its timers and deadlines, not those of threads and other processes."""

import asyncio


def pass_time(seconds: float) -> None:
    """What is due within so many seconds is due now, and runs when the loop goes on."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
