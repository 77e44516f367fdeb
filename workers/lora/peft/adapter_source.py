"""Reads adapter sources: a folder in place, a URL through fsspec into a cache folder. Torch-free.

Called by a rank's source lanes (workers/rank/transfers/adapter_lanes.py) and by AdapterChecker. The cache is addressed
by content: a folder named by a digest has that digest, and appears by one rename. Blocks; call it from a thread.
"""

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from tandem.workers.lora.peft.peft_config import CONFIG_FILE, MOST_CONFIG_BYTES
from tandem.workers.lora.peft.peft_folder import WEIGHT_FILE, adapter_digest
from tandem.workers.messages.errors import AdapterRefused, AdapterUnreadable
from tandem.workers.messages.request import AdapterRef

FETCH_S: Final = 120.0
"""Longest time for reading one adapter from its source."""
CHUNK_BYTES: Final = 2**20
KEPT_S: Final = 7 * 24 * 3600.0
"""The time that fetched files stay after their last use."""
LOCK_RETRY_S: Final = 0.1
S3: Final = ("s3://", "s3a://")
T = TypeVar("T")


def local_folder(
    ref: AdapterRef, cache_folder: Path, *, most_bytes: int | None = None, timeout_s: float = FETCH_S
) -> Path:
    """Returns a folder with the adapter's two files, fetched into the cache if the source is a URL.

    A fetched folder has the digest of `ref`; of a plain folder the reader checks it. most_bytes: the largest weight
    file to fetch. Raises AdapterUnreadable for a missing folder, and for a source that cannot be read in time or
    has another version now; AdapterRefused for a file that is too large.
    """
    if not ref.is_remote:
        folder = Path(ref.source)
        if not folder.is_dir():
            raise AdapterUnreadable("it is not a folder")
        return folder
    target = cache_folder / ref.digest
    deadline_s = time.monotonic() + timeout_s
    try:
        cache_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(cache_folder / f"{ref.digest}.lock", deadline_s):
            if target.is_dir():
                os.utime(target)
            else:
                _within(timeout_s, lambda stop: _fetch(ref, target, most_bytes, stop))
                _forget_old(cache_folder)
    except OSError as error:
        raise AdapterUnreadable(f"{cache_folder} cannot be written: {error.strerror or error}") from error
    return target


def remote_digest(source: str, cache_folder: Path, *, most_bytes: int, timeout_s: float = FETCH_S) -> str:
    """Fetches the adapter at a URL into the cache, where ranks find it, and returns its digest.

    most_bytes: the largest weight file to fetch. Errors as of local_folder().
    """
    cache_folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def fetch(stop: threading.Event) -> str:
        with tempfile.TemporaryDirectory(dir=cache_folder, prefix="fetching-") as name:
            _copy_files(source, Path(name), most_bytes, stop)
            digest = adapter_digest(Path(name))
            _publish(Path(name), cache_folder / digest)
            return digest

    return _within(timeout_s, fetch)


def _fetch(ref: AdapterRef, target: Path, most_bytes: int | None, stop: threading.Event) -> None:
    """Fetches the adapter to `target`; leaves nothing after an error."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as name:
        folder = Path(name)
        _copy_files(ref.source, folder, most_bytes, stop)
        if (found := adapter_digest(folder)) != ref.digest:
            raise AdapterUnreadable(f"its source holds an adapter with digest {found[:12]}, not {ref.digest[:12]}")
        _publish(folder, target)


def _publish(folder: Path, target: Path) -> None:
    """Moves the files of `folder` to `target` in one rename; the files of another fetch that was first stay."""
    whole = target.with_name(f"{folder.name}-whole")
    whole.mkdir(mode=0o700)
    try:
        for name in (CONFIG_FILE, WEIGHT_FILE):
            os.replace(folder / name, whole / name)
        whole.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(whole, ignore_errors=True)


def _forget_old(cache_folder: Path) -> None:
    """Removes adapters not used for KEPT_S, and remains of killed fetches."""
    oldest_s = time.time() - KEPT_S
    for entry in cache_folder.iterdir():
        with suppress(OSError):  # another process removes it too
            if entry.stat().st_mtime < oldest_s:
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()


def _copy_files(source: str, folder: Path, most_bytes: int | None, stop: threading.Event) -> None:
    """Copies the adapter's two files. Any error of a file system's client becomes AdapterUnreadable."""
    try:
        import fsspec

        # a new client: those that fsspec keeps also remember missing files, and sizes
        files, root = fsspec.core.url_to_fs(source, skip_instance_cache=True)
        for name, most in ((CONFIG_FILE, MOST_CONFIG_BYTES), (WEIGHT_FILE, most_bytes)):
            path = f"{root.rstrip('/')}/{name}"
            with files.open(path, "rb") as remote, (folder / name).open("wb") as local:
                size = _copy(remote, local, name, most, stop)
            if (whole := files.size(path)) not in (None, size):
                raise AdapterUnreadable(f"it cannot be read: {size} of {whole} bytes of {name} have arrived")
    except AdapterRefused:
        raise
    except Exception as error:
        raise AdapterUnreadable(f"it cannot be read: {_reason(source, error)}") from error


def _reason(source: str, error: Exception) -> str:
    """Returns the message for an error of a file system's client."""
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename or error}"
    if isinstance(error, ImportError) and source.startswith(S3):
        return "for S3, pip install 'tandem-serve[s3]' where gateways and ranks run"
    return f"{type(error).__name__}: {error}"


def _copy(remote: Any, local: Any, name: str, most_bytes: int | None, stop: threading.Event) -> int:
    """Copies a file in chunks; returns the number of bytes."""
    size = 0
    while chunk := remote.read(CHUNK_BYTES):
        if stop.is_set():
            raise AdapterRefused("it has taken too long and was given up")
        size += len(chunk)
        if most_bytes is not None and size > most_bytes:
            raise AdapterRefused(f"{name} has more than {most_bytes} bytes")
        local.write(chunk)
    return size


def _within(timeout_s: float, work: Callable[[threading.Event], T]) -> T:
    """Returns or raises what work(stop) does on a thread; after timeout_s sets `stop` and abandons the thread."""
    stop = threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(stop))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="adapter fetch", daemon=True)
    thread.start()
    thread.join(timeout_s)
    stop.set()
    if errors:
        raise errors[0]
    if not results:
        raise AdapterUnreadable(f"the source has not delivered it within {timeout_s:g} s")
    return results[0]


@contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    """Locks a digest, as all ranks of a machine fetch the same files at the same time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise AdapterUnreadable("another process has not fetched it in time") from None
                time.sleep(LOCK_RETRY_S)
        yield
    finally:
        os.close(descriptor)
