"""The gateway's Backend over one engine in this process, for `tandem run-batch`.

The engine runs on its own thread; streams are asyncio queues on the loop that opened the backend. The service's Backend
is cluster/gateway/generation/dispatch.py.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from tandem.cluster.gateway.generation.backend import GenerationStream
from tandem.configs.schema import EngineSettings
from tandem.workers.build import model_facts, open_executor
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.engine_loop import EngineLoop
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, TokenDelta
from tandem.workers.planning.start_notes import warn_of_pool

log = logging.getLogger("tandem.offline")
Item = list[TokenDelta] | RequestRefused | GroupLost | None
StreamKey = tuple[str, int]
FLUSH_S = 5.0


class LocalStream:
    """The deltas of one request, a list per step. `items`: those lists, then None or the error that ended it."""

    def __init__(self, request: GenerationRequest, abort: Callable[[Abort], None]) -> None:
        self._request = request
        self._abort = abort
        self._ended = False
        self.items: asyncio.Queue[Item] = asyncio.Queue()

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> list[TokenDelta]:
        if self._ended:
            raise StopAsyncIteration
        item = await self.items.get()
        if isinstance(item, list):
            return item
        self._ended = True
        if item is None:
            raise StopAsyncIteration
        raise item

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._abort(Abort(request_id=self._request.request_id, attempt=self._request.attempt))


class LocalBackend:
    """A Backend that owns an engine and its thread, as an async context manager. The engine's queue limits apply."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._streams: dict[StreamKey, LocalStream] = {}
        self._inbox: deque[GenerationRequest | Abort] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._lost: GroupLost | None = None

    async def __aenter__(self) -> "LocalBackend":
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(opened,), name="tandem-engine", daemon=True)
        self._thread.start()
        await opened
        return self

    async def __aexit__(self, *_: object) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    # ---- Backend -------------------------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        if self._lost is not None:
            raise self._lost
        stream = LocalStream(request, self._put)
        self._streams[(request.request_id, request.attempt)] = stream
        self._put(request)
        return stream

    async def abort(self, abort: Abort) -> None:
        self._put(abort)

    def ready(self) -> bool:
        return self._lost is None

    def load(self) -> Mapping[str, float | int | str]:
        return {"num_requests_running": len(self._streams), "num_requests_waiting": 0}

    async def metrics(self, *, with_tenants: bool) -> str:
        del with_tenants
        return ""

    def _put(self, item: GenerationRequest | Abort) -> None:
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def _run(self, opened: "asyncio.Future[None]") -> None:
        executor = open_executor(self._settings)
        try:
            ready = executor.start()
            facts = model_facts(self._settings, ready)
            warn_of_pool(self._settings.cache, facts.max_model_len, log)
            engine = Engine(self._settings, facts, executor, ready, self)
        except Exception as error:
            executor.close()
            self._loop.call_soon_threadsafe(opened.set_exception, error)
            return
        self._loop.call_soon_threadsafe(opened.set_result, None)
        try:
            driver = EngineLoop(engine, self)
            driver.run(lambda: self._stopping)
            driver.flush(FLUSH_S)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._lose_all, GroupLost(f"the engine stopped: {error}"))
        finally:
            engine.close()
            executor.close()

    def take(self, engine: Engine) -> None:
        """Implements Inbox."""
        with self._wake:
            items, self._inbox = self._inbox, deque()
        for item in items:
            self._take(engine, item)

    def wait(self, timeout_s: float | None) -> None:
        """Implements Inbox."""
        with self._wake:
            self._wake.wait_for(lambda: self._stopping or self._inbox, timeout_s)

    def _take(self, engine: Engine, item: GenerationRequest | Abort) -> None:
        if isinstance(item, Abort):
            engine.abort(item)
            return
        try:
            engine.add_request(item)
        except RequestRefused as error:
            self._loop.call_soon_threadsafe(self._finish, (item.request_id, item.attempt), error)

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Implements OutputSink. Calls the loop once per step, for all sequences."""
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """Implements OutputSink. Ends the stream of the request, with the refusal if there is one."""
        refused: RequestRefused | None = None
        if ended.refused is not None:
            status, code, param, message = ended.refused
            refused = RequestRefused(message, code=code, status=status, param=param)
        self._loop.call_soon_threadsafe(self._finish, (ended.request_id, ended.attempt), refused)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        by_request: dict[StreamKey, list[TokenDelta]] = {}
        for delta in deltas:
            by_request.setdefault((delta.request_id, delta.attempt), []).append(delta)
        for key, mine in by_request.items():
            if key in self._streams:
                self._streams[key].items.put_nowait(mine)

    def _finish(self, key: StreamKey, error: RequestRefused | GroupLost | None) -> None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            stream.items.put_nowait(error)

    def _lose_all(self, error: GroupLost) -> None:
        self._lost = error
        for key in list(self._streams):
            self._finish(key, error)
