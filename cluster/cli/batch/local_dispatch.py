"""The gateway's Dispatch over one engine in this process, for `tandem run-batch`.

The engine runs on its own thread; attempts belong to the loop that opened the dispatch. The service's Dispatch is
cluster/gateway/generation/serve_dispatch.py.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping

import msgspec

from tandem.cluster.gateway.generation.dispatch import TokenSink, lost
from tandem.cluster.routing.route_hint import RouteHint
from tandem.configs.schema import EngineSettings
from tandem.workers.build import model_facts, open_executor
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.engine_loop import EngineLoop
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, TokenDelta
from tandem.workers.planning.resolve import read_spec
from tandem.workers.planning.start_notes import warn_of_pool, warn_of_rope

log = logging.getLogger("tandem.offline")
RequestKey = tuple[str, int]
FLUSH_S = 5.0


class LocalAttempt:
    """Attempt in the engine of this process."""

    def __init__(self, owner: "LocalDispatch", request: GenerationRequest, to: TokenSink) -> None:
        self.request = request
        self.to = to
        self.ended: Ended | None = None
        self._owner = owner

    def look(self) -> Ended | None:
        """Implements Attempt."""
        return self.ended

    def abort(self, abort: Abort) -> None:
        """Implements Attempt."""
        self._owner.put(abort)

    def cancel(self) -> None:
        """Implements Attempt."""
        if self.ended is None:
            self._owner.put(Abort(request_id=self.request.request_id, attempt=self.request.attempt))


class LocalDispatch:
    """A Dispatch that owns an engine and its thread, as an async context manager. The engine's queue limits apply."""

    hold_s = 0.0

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._attempts: dict[RequestKey, LocalAttempt] = {}
        self._inbox: deque[GenerationRequest | Abort] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._lost: GroupLost | None = None

    async def __aenter__(self) -> "LocalDispatch":
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

    # ---- Dispatch ------------------------------------------------------------------------------------------------

    def send(self, request: GenerationRequest, hint: RouteHint, to: TokenSink) -> LocalAttempt:
        if self._lost is not None:
            raise RequestRefused(str(self._lost), code="service_unavailable", status=503)
        attempt = LocalAttempt(self, request, to)
        self._attempts[request.request_id, request.attempt] = attempt
        self.put(request)
        return attempt

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        return self._lost is None and not avoid

    def ready(self) -> bool:
        return self._lost is None

    def load(self) -> Mapping[str, float | int | str]:
        return {"num_requests_running": len(self._attempts), "num_requests_waiting": 0}

    async def metrics(self, *, with_tenants: bool) -> str:
        del with_tenants
        return ""

    def put(self, item: GenerationRequest | Abort) -> None:
        """Hands something to the engine's thread."""
        with self._wake:
            self._inbox.append(item)
            self._wake.notify()

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def _run(self, opened: "asyncio.Future[None]") -> None:
        executor = open_executor(self._settings)
        try:
            ready = executor.start()
            facts = model_facts(self._settings, ready)
            warn_of_rope(self._settings, read_spec(self._settings), log)
            warn_of_pool(self._settings.cache, facts, log)
            engine = build_engine(self._settings, facts, executor, ready, self)
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
            refused = (error.status, error.code, error.param, str(error))
            told = msgspec.structs.replace(lost(item, str(error), "bystander"), refused=refused, loss=None)
            self._loop.call_soon_threadsafe(self._finish, told)

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Implements OutputSink. Calls the loop once per step, for all sequences."""
        self._loop.call_soon_threadsafe(self._deliver, deltas)

    def ended(self, ended: Ended, request: GenerationRequest) -> None:
        """Implements OutputSink."""
        self._loop.call_soon_threadsafe(self._finish, ended)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        by_request: dict[RequestKey, list[TokenDelta]] = {}
        for delta in deltas:
            by_request.setdefault((delta.request_id, delta.attempt), []).append(delta)
        for key, mine in by_request.items():
            if key in self._attempts:
                self._attempts[key].to.take(mine)

    def _finish(self, ended: Ended) -> None:
        attempt = self._attempts.pop((ended.request_id, ended.attempt), None)
        if attempt is not None:
            attempt.ended = ended
            attempt.to.wake()

    def _lose_all(self, error: GroupLost) -> None:
        self._lost = error
        for attempt in list(self._attempts.values()):
            refused = (503, "service_unavailable", None, str(error))
            told = lost(attempt.request, str(error), "bystander")
            self._finish(msgspec.structs.replace(told, refused=refused, loss=None))
