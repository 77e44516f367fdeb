"""The gateway's Backend over one engine in this process: no Ray, no Serve, no sockets. For `tandem run-batch`.

The engine runs on its own thread; streams are asyncio queues on the loop that opened the backend. Never used by the
service, whose Backend is cluster/group_client.py.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

from cluster.gateway.backend import GenerationStream
from configs.schema import EngineSettings
from workers.build import model_facts, open_executor
from workers.engine.engine import Engine
from workers.errors import GroupLost, RequestRefused
from workers.messages import Abort, Ended, GenerationRequest, TokenDelta
from workers.start_notes import warn_of_pool

log = logging.getLogger("tandem.offline")
Item = list[TokenDelta] | RequestRefused | GroupLost | None
StreamKey = tuple[str, int]
COPY_POLL_S = 0.005
SETTLE_S = 5.0


class LocalStream:
    """One request's deltas, step by step; None ends it."""

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
            self._abort(Abort(request_id=self._request.request_id, epoch=self._request.epoch))


class LocalBackend:
    """Opens the engine on entering, closes it on leaving. At most the engine's own queue limit waits."""

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
        self._streams[(request.request_id, request.epoch)] = stream
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
            self._serve(engine)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._lose_all, GroupLost(f"the engine stopped: {error}"))
        finally:
            executor.close()

    def _serve(self, engine: Engine) -> None:
        while True:
            with self._wake:
                idle_s = COPY_POLL_S if engine.is_copying else None
                self._wake.wait_for(lambda: self._stopping or self._inbox or engine.has_work(), idle_s)
                if self._stopping:
                    break
                items, self._inbox = self._inbox, deque()
            for item in items:
                self._take(engine, item)
            if engine.has_work():
                engine.step()
            else:
                engine.tend_copies()
        if not engine.has_work():
            engine.settle(SETTLE_S)

    def _take(self, engine: Engine, item: GenerationRequest | Abort) -> None:
        if isinstance(item, Abort):
            engine.abort(item)
            return
        try:
            engine.add_request(item)
        except RequestRefused as error:
            self._loop.call_soon_threadsafe(self._finish, (item.request_id, item.epoch), error)

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """OutputSink: one hop to the loop per step, whatever the number of sequences."""
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """OutputSink: the end of a request."""
        refused: RequestRefused | None = None
        if ended.refused is not None:
            status, code, param, message = ended.refused
            refused = RequestRefused(message, code=code, status=status, param=param)
        self._loop.call_soon_threadsafe(self._finish, (ended.request_id, ended.epoch), refused)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        by_request: dict[StreamKey, list[TokenDelta]] = {}
        for delta in deltas:
            by_request.setdefault((delta.request_id, delta.epoch), []).append(delta)
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
