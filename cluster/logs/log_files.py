"""Log files, which outlive the service: one of bounded size for each process, in a folder of the run; old runs go.

    LOGS/run-20261127-114500-4711/ or LOGS/serve-0123456789ab/     0700, of one run or one application under Serve
        launcher.log  gateway-ID.log  group-ID.log  rank-ID-0.log  ...  and what was rotated away: X.log.1
        requests-ID.log    a gateway's lines about requests, which leave its other lines alone when they are many

LOGS is --log-dir, else ~/.local/state/tandem/logs. A process holds a lock on the file that it writes, so that nobody
removes it. Lines never have prompts, answers or keys. Each process calls open_log() once, at its start; those that
serve requests call hide_messages() too.
"""

import faulthandler
import fcntl
import io
import logging
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec

from tandem.cluster.logs.line_forms import lines_of
from tandem.configs.environment import state_folder
from tandem.configs.schema import LogFormat, LogLevel

LOGGERS = ("tandem", "ray.serve.tandem")
REQUESTS = "tandem.requests"
"""The logger of lines about requests, which have a file of their own."""
FILE_BYTES, OLD_FILES = 8 * 2**20, 2
"""Bytes of a file before it is rotated, and how many rotated ones are kept beside it."""
LOOK_S = 1.0
"""Longest time in which lines go to a file that is no longer the newest."""
KEPT_RUNS = 10
MOST_FILES = 200
"""Files in a folder of a run, beyond which those of processes that have ended go, the oldest first."""
MOST_FRAMES = 50
"""Frames of a traceback, the last ones, that are shown where messages are hidden."""
_PLAIN_WORDS = re.compile(r"[\w .]*")
RUN = re.compile(r"run-\d{8}-\d{6}-\d+|serve-[0-9a-f]+")


class LogPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place for the log files of a service, and their form. base: None for the user's folder on each machine. run:
    the folder in it; empty where the service's id names it. has_access_lines: False where Serve is told to write
    none."""

    level: LogLevel = "info"
    base: str | None = None
    run: str = ""
    form: LogFormat = "text"
    has_access_lines: bool = True

    def folder(self, service_id: str) -> Path:
        return self._base() / (self.run or f"serve-{service_id}")

    def _base(self) -> Path:
        return state_folder() / "logs" if self.base is None else Path(self.base)


class LogFile(RotatingFileHandler):
    """A handler whose file is locked for as long as it is written. Crashes of the interpreter go to the newest file,
    however often it was rotated, and so do lines of a process that was forked from the one that rotated it."""

    stream: io.TextIOWrapper

    def __init__(self, path: Path, form: LogFormat = "text") -> None:
        self._crashes: int | None = None
        self._size, self._look_at_s = 0, 0.0
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")
        self.setFormatter(lines_of(form))

    def take_crashes(self) -> None:
        """Has the interpreter write where it was when it crashes: by a descriptor, which it keeps as a number."""
        self._crashes = self._descriptor()
        faulthandler.enable(self._crashes)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging for each line. Whether the file is the newest still is asked once in LOOK_S, and before it
        is rotated: to ask takes as long as to write."""
        try:
            line = self.format(record) + self.terminator
            if not self._is_open:  # uvicorn's logging.config closes all handlers that there are
                self.stream = self._open()
            is_full = self._size + len(line) > FILE_BYTES
            if (is_full or time.monotonic() >= self._look_at_s) and self._takes_newest():
                is_full = self._size + len(line) > FILE_BYTES
            if is_full:
                self.doRollover()
            self._size += len(line)
            self.stream.write(line)
            self.flush()
        except Exception:
            self.handleError(record)

    @property
    def _is_open(self) -> bool:
        stream: io.TextIOWrapper | None = self.stream
        return stream is not None

    def _takes_newest(self) -> bool:
        """Opens the newest file if this one is it no longer, and returns whether it did."""
        self._look_at_s = time.monotonic() + LOOK_S
        before = self.stream
        with suppress(OSError):  # the folder is gone
            if self._is_newest(before):
                return False
            self.stream = self._open()
            before.close()
            return True
        return False

    def _is_newest(self, stream: io.TextIOWrapper) -> bool:
        found = os.fstat(stream.fileno())
        self._size = found.st_size
        try:
            return os.path.samestat(os.stat(self.baseFilename), found)
        except FileNotFoundError:
            return False

    def _open(self) -> io.TextIOWrapper:
        """Called by logging for each new file."""
        stream = super()._open()
        self._size = os.fstat(stream.fileno()).st_size
        with suppress(OSError):  # file systems without locks
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if self._crashes is not None:
            newest = self._descriptor()
            os.dup2(newest, self._crashes, inheritable=False)
            os.close(newest)
        return stream

    def _descriptor(self) -> int:
        return os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def hide_messages() -> None:
    """Lets no record of this process, from any logger and to any handler, show the message of an exception, which may
    quote a request. Its type, and where it was raised, are shown."""
    make = logging.getLogRecordFactory()
    if isinstance(make, _WithoutMessages):
        return
    logging.setLogRecordFactory(_WithoutMessages(make))


class _WithoutMessages:
    """A factory of records whose tracebacks are where() alone."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            record.exc_info, record.exc_text = None, where(error)
            if record.name == "asyncio":  # which shows the exception in the text of the line too
                record.msg, record.args = _PLAIN_WORDS.match(record.getMessage())[0], ()  # type: ignore[index]
        return record


def where(error: BaseException) -> str:
    """Returns the frames and the type of an exception, and of those that led to it."""
    return "\n".join(_where(error, set()))


def _where(error: BaseException, seen: set[int]) -> Iterator[str]:
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _where(before, seen)
        yield "which led to:"
    yield "Traceback (most recent call last, without messages):"
    frames = traceback.walk_tb(error.__traceback__)
    for frame in traceback.StackSummary.extract(frames, limit=-MOST_FRAMES, lookup_lines=False):
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}'
    yield f"{type(error).__module__}.{type(error).__qualname__}"
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _where(one, seen)


def run_name() -> str:
    """A name for the folder of a run that begins now, in this process."""
    return f"run-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def open_log(folder: Path, name: str, level: LogLevel, form: LogFormat = "text") -> LogFile:
    """Sends what this process logs, from this level on, to NAME.log in the folder, which is made; a crash of the
    interpreter too. Removes old runs beside it, and old files in it. OSError when it cannot be written."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = LogFile(folder / f"{name}.log", form)
    for each in LOGGERS:
        logging.getLogger(each).addHandler(handler)
    logging.getLogger("tandem").setLevel(level.upper())
    handler.take_crashes()
    with suppress(OSError):  # others may do the same
        remove_old(folder)
    return handler


def open_requests_log(folder: Path, name: str, form: LogFormat = "text") -> None:
    """Sends this process's lines about requests to NAME.log in the folder, and to no other file, whatever the level of
    other lines is. OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    logger = logging.getLogger(REQUESTS)
    logger.addHandler(LogFile(folder / f"{name}.log", form))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def remove_old(folder: Path) -> None:
    """Removes the oldest runs beside the folder, beyond KEPT_RUNS, and the oldest files in it, beyond MOST_FILES; none
    that a process writes. OSError."""
    runs = [each for each in folder.parent.iterdir() if RUN.fullmatch(each.name) and each.is_dir()]
    for run in sorted(runs, key=_age)[KEPT_RUNS:]:
        if run != folder and not any(map(is_written, run.glob("*.log"))):
            shutil.rmtree(run, ignore_errors=True)
    for file in sorted(folder.glob("*.log*"), key=_age)[MOST_FILES:]:
        if not is_written(file):
            file.unlink(missing_ok=True)


def is_written(file: Path) -> bool:
    """Returns whether a process has the file open to write its log."""
    try:
        with file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _age(path: Path) -> float:
    """A key that sorts the newest first."""
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0
