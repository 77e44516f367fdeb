"""GroupRecording: the recorder of one group, and its files beside the group's log (--record-mib, --record).

The tape is in this process's memory. It is written when the group is lost, at SIGUSR2, and when an operator asks; never
on the engine's thread. A disk that is full costs the file and nothing else.
"""

import asyncio
import faulthandler
import logging
import os
import secrets
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from typing import TextIO

import msgspec

from tandem.cluster.wire.service_facts import ServiceFacts
from tandem.configs.schema import EngineSettings
from tandem.workers.engine.admission import ModelFacts
from tandem.workers.engine.build_engine import build_engine
from tandem.workers.engine.engine import Engine
from tandem.workers.engine.executor import Executor, ExecutorReady
from tandem.workers.engine.recording.call_records import RecordingHeader
from tandem.workers.engine.recording.recorded_engine import recorded_engine
from tandem.workers.engine.recording.recording_file import SUFFIX, RecordingError, write_recording
from tandem.workers.engine.recording.redaction import redacted
from tandem.workers.engine.recording.tape import Tape
from tandem.workers.engine.thread.engine_thread import EngineThread

log = logging.getLogger("tandem.group")
LOST_S, LOST_BYTES = 5.0, 16 * 2**20
"""The longest that the process of a lost group stays for its recording, and the most that it hides ids in then."""
SETTLE_S = 0.1
PAUSE_S = 0.001
"""Pauses of the thread that hides ids, so that the engine's thread runs meanwhile."""
OFF = "this group records nothing; --record-mib was not given"
FAILED = "the recorder of this group has failed, as the group's log says, and is off"


class WrittenRecording(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was written. num_calls: of the engine. is_whole: it begins with the group's life."""

    file: str
    mode: str
    num_bytes: int
    num_calls: int
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.file} ({self.mode}, {self.num_bytes} bytes, {self.num_calls} calls)"


class GroupRecording:
    """The tape of one group's engine, if it is recorded. now_s: the wall clock, in files' names."""

    def __init__(self, facts: ServiceFacts, group: str, now_s: Callable[[], float] = time.time) -> None:
        self._facts = facts
        self._group = group
        self._now_s = now_s
        self._tape = Tape(facts.record_mib * 2**20) if facts.record_mib else None
        self._secret = secrets.token_bytes(32)
        self._settings = b""
        self._num_blocks = 0
        self._writing = asyncio.Lock()

    def engine(
        self, settings: EngineSettings, facts: ModelFacts, ranks: Executor, ready: ExecutorReady, thread: EngineThread
    ) -> Engine:
        """Returns the engine over ranks that are ready, on the tape if there is one. Called on the engine's thread."""
        if self._tape is None:
            return build_engine(settings, facts, ranks, ready, thread, time.monotonic, thread.begun)
        self._settings, self._num_blocks = msgspec.msgpack.encode(settings), ready.num_blocks
        return recorded_engine(settings, facts, ranks, ready, thread, time.monotonic, thread.begun, self._tape)

    async def write(self) -> WrittenRecording:
        """Writes what the tape holds to a file. RecordingError if there is nothing, or it cannot be written."""
        async with self._writing:
            return await asyncio.to_thread(self._try_to_write, PAUSE_S)

    async def write_at_loss(self) -> str:
        """Writes the last steps of a lost group, if it was recorded; returns words for its event, ahead of which goes
        the reason of the loss: where they are, or why they are not there."""
        if self._tape is None:
            return ""
        try:
            async with asyncio.timeout(LOST_S):
                written = await asyncio.to_thread(self._try_to_write, 0.0, LOST_BYTES)
        except TimeoutError:
            return self._without_file(f"the recording was not written within {LOST_S:.0f} s")
        except RecordingError as error:
            return self._without_file(str(error))
        log.error("group %s: its last steps are in %s", self._group, written)
        return f"; its last steps are in {written.file}"

    def _without_file(self, why: str) -> str:
        """Says in the log why there is no recording of the loss, and returns the same for the event."""
        log.error("group %s: %s", self._group, why)
        return f"; its last steps are lost: {why}"

    async def write_at_signal(self) -> None:
        """Writes a file, and says so in the log."""
        try:
            log.info("group %s: its steps are in %s, as SIGUSR2 asked", self._group, await self.write())
        except RecordingError as error:
            log.warning("group %s: SIGUSR2 asked for a recording: %s", self._group, error)

    async def answer(self) -> bytes:
        """Writes a file at an operator's order; returns the answer to that, as JSON."""
        try:
            return msgspec.json.encode(await self.write())
        except RecordingError as error:
            return msgspec.json.encode({"error": str(error)})

    def _try_to_write(self, pause_s: float, most_bytes: int | None = None) -> WrittenRecording:
        """Does what _write() does. RecordingError whatever goes wrong, without its words, which may be a client's."""
        try:
            return self._write(pause_s, most_bytes)
        except RecordingError:
            raise
        except Exception as error:
            *_, place = traceback.extract_tb(error.__traceback__)
            what = f"{type(error).__name__} in {place.name}, line {place.lineno}"
            raise RecordingError(f"the recording could not be made: {what}") from None

    def _write(self, pause_s: float, most_bytes: int | None = None) -> WrittenRecording:
        if self._tape is None:
            raise RecordingError(OFF)
        if self._facts.logs is None:
            raise RecordingError("this service has no folder for log files, where recordings would be")
        if self._tape.is_off:
            raise RecordingError(FAILED)
        copy = self._tape.take(most_bytes)
        if copy is None:
            raise RecordingError("the group has done nothing that could be recorded yet")
        if self._facts.record == "redacted":
            copy = redacted(copy, self._secret, lambda: time.sleep(pause_s))
        written_s = self._now_s()
        header = RecordingHeader(
            product=version("tandem-serve"),
            mode=self._facts.record,
            group=self._group,
            written_s=written_s,
            settings=self._settings,
            num_blocks=self._num_blocks,
            is_whole=copy.is_whole,
            num_calls=len(copy.calls),
        )
        moment = datetime.fromtimestamp(written_s).strftime("%Y%m%d-%H%M%S-%f")[:-3]
        path = self._facts.logs.folder(self._facts.service_id) / f"group-{self._group}-{moment}{SUFFIX}"
        num_bytes = write_recording(path, header, copy.state, copy.calls)
        return WrittenRecording(
            file=str(path), mode=header.mode, num_bytes=num_bytes, num_calls=header.num_calls, is_whole=copy.is_whole
        )


class SignalPipe:
    """Has a call made on an event loop at each SIGUSR2, from any thread: Python's handlers are set on the main thread
    only, where replicas' code never runs. faulthandler's are set anywhere; it writes the frames of the thread that gets
    the signal, the main one, to a pipe, which the loop reads.

    Keeps the signal for as long as it lives; close() gives it back to the system."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._loop = loop
        self._call = call
        self._due: asyncio.TimerHandle | None = None
        self._out, into = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(into, False)
        self._into: TextIO = os.fdopen(into, "w")
        loop.add_reader(self._out, self._read)
        # the frames of other threads cannot be read while they run: with all_threads the process may end of it
        faulthandler.register(signal.SIGUSR2, self._into, all_threads=False)

    def _read(self) -> None:
        """One signal is many writes: what comes within SETTLE_S is one call."""
        self._drain()
        if self._due is None:
            self._due = self._loop.call_later(SETTLE_S, self._make_call)

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            while os.read(self._out, 65536):
                pass

    def _make_call(self) -> None:
        self._drain()
        self._due = None
        self._call()

    def close(self) -> None:
        """Gives the signal back."""
        faulthandler.unregister(signal.SIGUSR2)
        if self._due is not None:
            self._due.cancel()
        self._loop.remove_reader(self._out)
        self._into.close()
        os.close(self._out)
