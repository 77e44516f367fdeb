"""The journal of one gateway's life: append-only files of JSON lines, written and synced in batches off the loop.

    bill, without an end  the gateway owes a row for this request
    bill, with its end    the row
    carried_on            the file is full: what it owes is in the next one

A file is locked while its gateway writes it. What an unlocked one still owes ends as client_lost (read_rows), for its
gateway is gone. A torn last line was never acknowledged.
"""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tandem.cluster.tenants.billing_record import CLIENT_LOST, BillingRecord

log = logging.getLogger("tandem.ledger")
PREFIX, SUFFIX = "usage-", ".jsonl"
NEW = "new-"
OPEN_TRIES = 5
ROTATE_BYTES = 64 * 2**20
ROTATE_S = 86400.0


class CarriedOn(msgspec.Struct, frozen=True, tag="carried_on"):
    """The last line of a full file: what it owes is in the next one."""


Line = BillingRecord | CarriedOn


class Journal:
    """The journal of one gateway. A disk that takes no more costs the journal, not the requests.

    A file that has grown or aged is closed and another begun: `paths` are all of this life, the last one is locked.
    One event loop uses it; a thread writes.
    """

    def __init__(self, folder: Path, gateway: str, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._stem = folder / f"{PREFIX}{gateway}"
        self._rotate_bytes = rotate_bytes
        self.paths: list[Path] = []
        self._descriptor = self._open()
        self._opened_s = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tandem-journal")
        self._lines: list[Line] = []
        self._owed: dict[str, BillingRecord] = {}
        self._next: asyncio.Event = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self.is_failing = False

    def note(self, line: Line) -> None:
        """Puts a line into the next batch; never waits."""
        self._lines.append(line)
        if isinstance(line, BillingRecord):
            _note_owed(self._owed, line)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_all(), name="journal")

    async def sync(self) -> None:
        """Returns when what was noted last is on disk, or the disk has refused it (logged)."""
        if self._lines:
            await self._next.wait()

    async def close(self) -> None:
        """Writes what is left and unlocks the file."""
        while self._writing is not None and not self._writing.done():
            await asyncio.wait({self._writing})
        self._thread.shutdown(wait=True)
        os.close(self._descriptor)

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._lines:
            batch, self._lines = self._lines, []
            owed = list(self._owed.values())
            written, self._next = self._next, asyncio.Event()
            try:
                await loop.run_in_executor(self._thread, self._write, batch, owed)
                self.is_failing = False
            except OSError as error:
                if not self.is_failing:
                    log.error("usage cannot be journaled in %s, and goes to Redis only: %s", self._stem, error)
                self.is_failing = True
            finally:
                written.set()

    def _write(self, batch: list[Line], owed: list[BillingRecord]) -> None:
        """Writes a batch, on the thread. One without an end needs no sync: it only lists what is owed."""
        data = _encoded(batch)
        if self.is_failing:
            data = b"\n" + data  # after a torn line
        _write_whole(self._descriptor, data)
        if any(isinstance(line, BillingRecord) and line.terminal is not None for line in batch):
            os.fdatasync(self._descriptor)
        aged = time.monotonic() - self._opened_s > ROTATE_S
        if aged or os.fstat(self._descriptor).st_size > self._rotate_bytes:
            self._rotate(owed)

    def _rotate(self, owed: list[BillingRecord]) -> None:
        """The next file begins with what is owed, then the last one is marked as owing nothing."""
        before, self._descriptor = self._descriptor, self._open()
        self._opened_s = time.monotonic()
        _write_whole(self._descriptor, _encoded(owed))
        os.fdatasync(self._descriptor)
        _write_whole(before, _encoded([CarriedOn()]))
        os.close(before)

    def _open(self) -> int:
        """The file has its name when it is locked: one that is not is nobody's."""
        path = self._stem.with_name(f"{self._stem.name}-{len(self.paths)}{SUFFIX}")
        fresh = path.with_name(f"{NEW}{path.name}")
        for tries_left in reversed(range(OPEN_TRIES)):
            try:
                fresh.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
                break
            except FileNotFoundError:  # the last gateway before has just removed the folder
                if not tries_left:
                    raise
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fresh.rename(path)
        self.paths.append(path)
        return descriptor


def gateway_of(path: Path) -> str:
    """The gateway that has written a journal."""
    return path.name.removeprefix(PREFIX).rpartition("-")[0]


def read_rows(path: Path, *, is_over: bool) -> Iterator[BillingRecord]:
    """The rows of a journal. is_over: its gateway is gone, so what it owes ends as client_lost."""
    owed: dict[str, BillingRecord] = {}
    for line in _read_lines(path):
        if isinstance(line, CarriedOn):
            owed.clear()
            continue
        _note_owed(owed, line)
        if line.terminal is not None:
            yield line
    if is_over:
        yield from (msgspec.structs.replace(line, terminal=CLIENT_LOST) for line in owed.values())


def left_behind(folder: Path, max_age_s: float) -> Iterator[Path]:
    """Journals in the folder that nobody writes any more; those that nothing would take are removed."""
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        is_left = False
        with suppress(OSError), _unwritten(path) as is_unwritten:
            is_old = time.time() - path.stat().st_mtime > max_age_s
            if is_unwritten and is_old:
                path.unlink()
            is_left = is_unwritten and not is_old
        if is_left:
            yield path


def is_in_use(folder: Path) -> bool:
    """True while a gateway journals in this folder."""
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with _unwritten(path) as is_unwritten:
            if not is_unwritten:
                return True
    return False


def remove_unlocked(folder: Path) -> bool:
    """Removes the journals that nobody writes. False: somebody writes one by now."""
    is_unused = True
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with suppress(FileNotFoundError), _unwritten(path) as is_unwritten:
            if is_unwritten:
                path.unlink()
            else:
                is_unused = False
    return is_unused


@contextmanager
def _unwritten(path: Path) -> Iterator[bool]:
    """True while nobody writes the journal, and nobody begins to; False when somebody does."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _read_lines(path: Path) -> Iterable[Line]:
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if not data.strip():
                continue
            try:
                yield decoder.decode(data)
            except msgspec.DecodeError:
                level = logging.ERROR if data.endswith(b"\n") else logging.INFO
                log.log(level, "%s:%d is torn and left out", path, number)


def _encoded(lines: Iterable[Line]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _write_whole(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _note_owed(owed: dict[str, BillingRecord], record: BillingRecord) -> None:
    if record.terminal is None:
        owed[record.id] = record
    else:
        owed.pop(record.id, None)
