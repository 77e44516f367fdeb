"""LocalEngine: an engine in this process without a service, on a thread of its own, for calls from any thread.

Owned by LLM and AsyncLLM. All calls put their requests into one run of the engine (continuous batching across calls);
each gets its own tokens and ends, and its errors and its Ctrl-C end its own requests only. Next:
workers/engine/thread/engine_thread.py.
"""

import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from tandem.configs.schema import EngineSettings
from tandem.workers.build import model_facts, open_executor
from tandem.workers.engine.base.stats import EngineStats
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.thread.engine_thread import EngineThread
from tandem.workers.messages.errors import GroupLost
from tandem.workers.messages.refusals import GROUP_ENDED, GROUP_LOST
from tandem.workers.messages.request import Abort, Ended, GenerationRequest, ReplyTo, TokenDelta
from tandem.workers.planning.start_notes import warn_of_pool

log = logging.getLogger("tandem.offline")
FLUSH_S = 5.0
"""The longest wait, at the end, for KV that is being stored to host memory or disk."""
CLOSED = "this LLM is closed"
T = TypeVar("T")
Say = Callable[[Any], None]


class CallSink(Protocol):
    """The side of a call that gets its tokens."""

    def deltas(self, deltas: list[TokenDelta]) -> list[Abort]:
        """Takes tokens of its requests, on the engine's thread. Returns what the engine has to end now, as a stop
        string was found. An exception is the call's."""
        ...


class Calls:
    """The calls that run: TokenChannel and EngineListener of the engine's thread, which knows nothing else of an LLM,
    so that an LLM which nobody has any more can end it. failure: why the engine has stopped by itself."""

    def __init__(self) -> None:
        self.failure: str | None = None
        self.is_over = False
        self._numbers = itertools.count()
        self._sinks: dict[ReplyTo, tuple[CallSink, Say]] = {}
        self._waiting: set[Say] = set()
        self._aborts: list[Abort] = []

    # ---- from any thread ----

    def enter(self, sink: CallSink, fail: Say) -> ReplyTo:
        """Adds a call; returns the address for its requests. fail: told of an exception of the sink."""
        address = ReplyTo("", str(next(self._numbers)))
        self._sinks[address] = (sink, fail)
        return address

    def leave(self, address: ReplyTo) -> None:
        """Drops a call: what is still on its way to it is dropped too."""
        self._sinks.pop(address, None)

    def await_answer(self, say: Say) -> None:
        """Has `say` told when the engine ends before it has answered."""
        self._waiting.add(say)
        if self.is_over:
            self.close()

    def answered(self, say: Say) -> None:
        self._waiting.discard(say)

    # ---- TokenChannel ----

    def open(self, reply_to: ReplyTo) -> None:
        """Implements TokenChannel."""

    def send(self, batches: Iterable[tuple[ReplyTo, list[TokenDelta]]]) -> None:
        """Implements TokenChannel."""
        for reply_to, deltas in batches:
            if (call := self._sinks.get(reply_to)) is None:
                continue
            sink, fail = call
            try:
                self._aborts += sink.deltas(deltas)
            except Exception as error:
                self.leave(reply_to)
                fail(error)

    def receive(self) -> list[Abort]:
        """Implements TokenChannel."""
        aborts, self._aborts = self._aborts, []
        return aborts

    def has_doubtful_link(self) -> bool:
        """Implements TokenChannel."""
        return False

    def lost(self, after_s: float) -> list[ReplyTo]:
        """Implements TokenChannel."""
        return []

    def close(self) -> None:
        """Implements TokenChannel: tells those that wait for answers that there will be none."""
        self.is_over = True
        for say in list(self._waiting):
            say(RuntimeError(self.failure or CLOSED))

    # ---- EngineListener ----

    def opened(self) -> None:
        """Implements EngineListener."""

    def stats(self, stats: EngineStats, residency: Mapping[str, str]) -> None:
        """Implements EngineListener: who asks is told (LocalEngine.ask)."""

    def failed(self, error: Exception, opened: bool) -> None:
        """Implements EngineListener."""
        self.failure = f"this LLM is closed: the engine stopped: {error}"


class LocalEngine:
    """Loads a model, in the calling thread, and runs its engine. engine, executor: of the thread. facts: of the model.

    Raises SettingsError or GroupLost if the model cannot be loaded. Ends with close(), or when nobody has it any more.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._pid = os.getpid()
        self._closed = False
        self._ids = itertools.count()
        self._calls = calls = Calls()
        self.executor = open_executor(settings)
        self._thread = EngineThread(calls, lambda poller, clock: calls, flush_s=FLUSH_S)
        try:
            ready = self.executor.start()
            self.facts = model_facts(settings, ready)
            for note in ready.kernel_notes:
                log.warning("%s", note)
            warn_of_pool(settings.cache, self.facts, log)
            self.engine = engine = build_engine(settings, self.facts, self.executor, ready, self._thread)
        except BaseException:
            self.executor.close()
            raise
        self._thread.start_engine(lambda _: engine, self.executor.close)
        self._finalizer = weakref.finalize(self, _end, self._thread, self._pid)

    def new_id(self) -> str:
        """Returns a number, as text, that no other request of this engine has."""
        return str(next(self._ids))

    # ---- calls, from any thread ----

    def check(self) -> None:
        """Raises RuntimeError where no call can run: after close(), in a forked process, on the engine's own thread."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this LLM belongs to process {self._pid}, and process {os.getpid()} was forked from it, without its "
                'engine. Make an LLM in the new process, or start that with the method "spawn"'
            )
        if self._closed or self._calls.failure:
            raise RuntimeError(self._calls.failure or CLOSED)
        if threading.current_thread() is self._thread:
            raise RuntimeError("an LLM cannot be called on its engine's thread, which would wait for itself")

    def call(self, sink: CallSink, fail: Say | None = None) -> "LocalCall":
        """Returns a call, which is a context manager. sink: gets its tokens. fail: told of an exception of the sink, on
        the engine's thread; None: LocalCall.run() raises it."""
        self.check()
        return LocalCall(self, self._calls, sink, fail)

    def submit(self, requests: Sequence[GenerationRequest], say: Callable[[Ended], None]) -> None:
        """Starts requests together. say: told the end of each, once, on the engine's thread."""
        self._thread.submit_all([(request, say) for request in requests])

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; those that have ended already are left alone."""
        aborts = [Abort(request_id=name, attempt=0) for name in request_ids]

        def apply(engine: Engine) -> None:
            for abort in aborts:
                engine.abort(abort)

        self._thread.call(apply)

    def ask(self, question: Callable[[Engine], T]) -> T:
        """Returns what `question` says of the engine between two steps; its exception is raised here."""
        self.check()
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread.call(partial(_answer, question, answers.put))
        self._calls.await_answer(answers.put)
        try:
            found = answers.get()
        finally:
            self._calls.answered(answers.put)
        if isinstance(found, BaseException):
            raise found
        answer: T = found[0]
        return answer

    def close(self) -> None:
        """Ends the engine and the ranks; calls that run get a RuntimeError. Idempotent; in a forked process it does
        nothing, as the engine is the other's."""
        if os.getpid() == self._pid:
            self._closed = True
            self._finalizer()


class LocalCall:
    """One call of a LocalEngine: its requests have `address` as their reply_to."""

    def __init__(self, engine: LocalEngine, calls: Calls, sink: CallSink, fail: Say | None) -> None:
        self._engine = engine
        self._calls = calls
        self._ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.address = calls.enter(sink, fail or self._ends.put)

    def __enter__(self) -> "LocalCall":
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.leave(self.address)

    def run(self, requests: Sequence[GenerationRequest], took: Callable[[Ended], None]) -> None:
        """Runs requests to their ends. took: called with the end of each, on this thread. If it raises, or the wait is
        interrupted, those that are open are aborted.

        Raises GroupLost when the engine stops, RuntimeError when it is closed, and what the sink has raised.
        """
        open_ids = {request.request_id for request in requests}
        try:
            self._engine.submit(requests, self._ends.put)
            while open_ids:
                ended = self._ends.get()
                if isinstance(ended, BaseException):
                    raise ended
                open_ids.discard(ended.request_id)
                raise_if_lost(ended)
                took(ended)
        except BaseException:
            self._engine.abort(open_ids)
            raise


def raise_if_lost(ended: Ended) -> None:
    """Raises GroupLost or RuntimeError for a request that has ended with the engine."""
    if ended.refused is not None and ended.refused[1] == GROUP_LOST:
        raise GroupLost(ended.refused[3])
    if ended.refused is not None and ended.refused[1] == GROUP_ENDED:
        raise RuntimeError("this LLM was closed while the call was running")


def _answer(question: Callable[[Engine], Any], say: Say, engine: Engine) -> None:
    try:
        say((question(engine),))
    except Exception as error:
        say(error)


def _end(thread: EngineThread, pid: int) -> None:
    """Stops the engine's thread and waits for it; a forked process has no such thread."""
    if os.getpid() == pid:
        thread.stop()
        if threading.current_thread() is not thread:
            thread.join()
