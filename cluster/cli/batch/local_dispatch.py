"""The gateway's Dispatch over one engine in this process, for `tandem run-batch`.

The engine runs on a thread as a group's does (workers/engine/thread/engine_thread.py); attempts belong to the loop that
opened the dispatch. The service's Dispatch is cluster/gateway/generation/serve_dispatch.py.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import msgspec

from tandem.cluster.gateway.generation.dispatch import DrainState
from tandem.cluster.gateway.generation.part import RequestPart
from tandem.cluster.routing.route_hint import RouteHint
from tandem.cluster.routing.route_table import RouteTable
from tandem.configs.schema import EngineSettings
from tandem.workers.build import model_facts, open_executor
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.thread.engine_thread import EngineThread
from tandem.workers.executor.rank_group import RankGroup
from tandem.workers.messages.errors import GroupLost, RequestRefused
from tandem.workers.messages.refusals import GROUP_ENDED, GROUP_LOST, refused
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, ReplyTo, TokenDelta
from tandem.workers.planning.resolve import read_spec
from tandem.workers.planning.start_notes import warn_of_model, warn_of_pool

log = logging.getLogger("tandem.offline")
RequestKey = tuple[str, int]
FLUSH_S = 5.0
HERE = ReplyTo("", "")


class LocalChannel:
    """TokenChannel to a loop of this process, which is always there. deliver: called on the loop, once per step."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[TokenDelta]], None]) -> None:
        self._loop = loop
        self._deliver = deliver

    def open(self, reply_to: ReplyTo) -> None:
        """Implements TokenChannel."""

    def send(self, batches: Iterable[tuple[ReplyTo, list[TokenDelta]]]) -> None:
        """Implements TokenChannel."""
        for _, deltas in batches:
            self._loop.call_soon_threadsafe(self._deliver, deltas)

    def receive(self) -> list[Abort]:
        """Implements TokenChannel."""
        return []

    def has_doubtful_link(self) -> bool:
        """Implements TokenChannel."""
        return False

    def lost(self, after_s: float) -> list[ReplyTo]:
        """Implements TokenChannel."""
        return []

    def close(self) -> None:
        """Implements TokenChannel."""


class LocalDispatch:
    """A Dispatch that owns an engine and its thread, as an async context manager. The engine's queue limits apply."""

    hold_s = 0.0

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._attempts: dict[RequestKey, RequestPart] = {}
        self._executor: RankGroup | None = None
        self._lost: GroupLost | None = None

    async def __aenter__(self) -> "LocalDispatch":
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        channel = LocalChannel(self._loop, self._deliver)
        self._thread = EngineThread(self, lambda poller, clock: channel, flush_s=FLUSH_S)
        self._thread.start_engine(self._open_engine, self._close_engine)
        try:
            await self._opened
        except Exception:
            await asyncio.to_thread(self._thread.join)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    # ---- Dispatch ------------------------------------------------------------------------------------------------

    def send(self, part: RequestPart, hint: RouteHint) -> None:
        if self._lost is not None:
            raise RequestRefused(str(self._lost), code="service_unavailable", status=503)
        request = msgspec.structs.replace(part.request, reply_to=HERE)
        self._attempts[request.request_id, request.attempt] = part
        self._thread.submit(request, self._ended)

    def abort(self, abort: Abort) -> None:
        self._thread.call(lambda engine: engine.abort(abort))

    def cancel(self, part: RequestPart) -> None:
        request = part.request
        if part.ended is None and (request.request_id, request.attempt) in self._attempts:
            self.abort(Abort(request_id=request.request_id, attempt=request.attempt))

    def has_group(self, avoid: Collection[str] = ()) -> bool:
        return self._lost is None and not avoid

    def ready(self) -> bool:
        return self._lost is None

    @property
    def is_asleep(self) -> bool:
        return False

    def load(self) -> Mapping[str, float | int | str]:
        return {"num_requests_running": len(self._attempts), "num_requests_waiting": 0}

    def route_table(self, request: GenerationRequest, hint: RouteHint) -> RouteTable:
        message = "There is one engine, in this process: nothing is routed."
        raise RequestRefused(message, code="service_unavailable", status=503)

    async def groups(self) -> tuple[()]:
        return ()

    async def reset_prefix_caches(self) -> Collection[str]:
        def forget(engine: Engine) -> None:
            engine.reset_prefix_cache()

        self._thread.call(forget)
        return ()

    async def drain(self, target: str, timeout_s: float | None) -> DrainState:
        raise RequestRefused("A batch has no groups.", code="not_found", status=404, param="target")

    async def record(self, group: str) -> Mapping[str, Any]:
        raise RequestRefused("A batch has no groups.", code="not_found", status=404, param="group")

    async def metrics(self, *, with_tenants: bool) -> str:
        del with_tenants
        return ""

    # ---- the engine's thread -------------------------------------------------------------------------------------

    def _open_engine(self, sink: EngineThread) -> Engine:
        self._executor = open_executor(self._settings)
        ready = self._executor.start()
        facts = model_facts(self._settings, ready)
        warn_of_model(self._settings, read_spec(self._settings), log)
        for note in ready.kernel_notes:
            log.warning("%s", note)
        warn_of_pool(self._settings.cache, facts, log)
        return build_engine(self._settings, facts, self._executor, ready, sink)

    def _close_engine(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def opened(self) -> None:
        """Implements EngineListener."""
        self._loop.call_soon_threadsafe(self._opened.set_result, None)

    def stats(self, stats: EngineStats, residency: Mapping[str, str]) -> None:
        """Implements EngineListener: a batch has no metrics."""

    def failed(self, error: Exception, opened: bool) -> None:
        """Implements EngineListener."""
        if opened:
            self._loop.call_soon_threadsafe(self._lose_all, GroupLost(f"the engine stopped: {error}"))
        else:
            self._loop.call_soon_threadsafe(self._opened.set_exception, error)

    def _ended(self, ended: Ended) -> None:
        """Passes on the end of one request. The engine's own end is told by _lose_all(), to all requests at once."""
        if ended.refused is None or ended.refused[1] not in (GROUP_LOST, GROUP_ENDED):
            self._loop.call_soon_threadsafe(self._finish, ended)

    # ---- the loop ------------------------------------------------------------------------------------------------

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        by_request: dict[RequestKey, list[TokenDelta]] = {}
        for delta in deltas:
            by_request.setdefault((delta.request_id, delta.attempt), []).append(delta)
        for key, mine in by_request.items():
            if key in self._attempts:
                self._attempts[key].take(mine)

    def _finish(self, ended: Ended) -> None:
        part = self._attempts.pop((ended.request_id, ended.attempt), None)
        if part is not None:
            part.end(ended)

    def _lose_all(self, error: GroupLost) -> None:
        self._lost = error
        if not self._opened.done():
            self._opened.set_exception(error)
        for part in list(self._attempts.values()):
            self._finish(refused(part.request, 503, "service_unavailable", None, str(error)))
