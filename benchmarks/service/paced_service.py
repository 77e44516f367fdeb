"""A service that answers completions by the clock: the first token after a fixed time, each next one after another.

It shows what a client of loads says of times that are known, on machines whose cores others want too.
"""

import asyncio
import json
import threading
from typing import Any

from aiohttp import web

FIRST_S, NEXT_S = 0.2, 0.04
MODEL = "paced"


class PacedService:
    """The service on a port of its own, in a thread; a context manager. Every answer is exactly as long as asked for;
    a first token comes FIRST_S after its request, the others NEXT_S apart, by deadlines that do not drift."""

    def __init__(self) -> None:
        self.model_name, self._ready = MODEL, threading.Event()

    def __enter__(self) -> "PacedService":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join()

    async def _run(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]  # of an asyncio server
        self.url, self._loop, self._ends = f"http://127.0.0.1:{port}", asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._ends.wait()
        await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        due_s = asyncio.get_running_loop().time() + FIRST_S
        asked = await request.json()
        count = int(asked["max_tokens"])
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for place in range(count):
            await asyncio.sleep(due_s + place * NEXT_S - asyncio.get_running_loop().time())
            await answer.write(_event(choices=[{"index": 0, "text": " a", "finish_reason": None}]))
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count, "total_tokens": count}
        await answer.write(_event(choices=[], usage=usage) + b"data: [DONE]\n\n")
        return answer


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps({"object": "text_completion", "model": MODEL, **fields}).encode() + b"\n\n"
