"""Where an adapter's files are read from: a folder as it is, anything else through fsspec into a cache folder.

Called by a rank's source mover (workers/lora/movers.py) and by whoever lists adapters; torch-free. The cache is
addressed by content: what lies under a digest has that digest, and gets there by one rename. Blocks; call it from a
thread.
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

from workers.errors import AdapterRefused, AdapterUnreadable
from workers.messages import AdapterRef
from workers.peft_config import CONFIG_FILE, MOST_CONFIG_BYTES
from workers.peft_folder import WEIGHT_FILE, adapter_digest

FETCH_S: Final = 120.0
"""How long a source may take for one adapter before it is given up."""
CHUNK_BYTES: Final = 2**20
KEPT_S: Final = 7 * 24 * 3600.0
"""How long fetched files stay after their last use."""
LOCK_RETRY_S: Final = 0.1
S3: Final = ("s3://", "s3a://")
T = TypeVar("T")


def local_folder(
    ref: AdapterRef, cache_folder: Path, *, most_bytes: int | None = None, timeout_s: float = FETCH_S
) -> Path:
    """A folder with the adapter's two files. One that is fetched has the wanted digest; of a plain folder, that is
    for its reader to check. most_bytes: the largest weight file worth fetching.

    AdapterUnreadable: no such folder, a source that cannot be reached or read in time, or that has another version by
    now. AdapterRefused: too large.
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
    """The digest of what lies at a URL now; the files stay in the cache, so that serving them fetches nothing.
    most_bytes: the largest weight file worth fetching."""
    cache_folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def fetch(stop: threading.Event) -> str:
        with tempfile.TemporaryDirectory(dir=cache_folder, prefix="fetching-") as name:
            _copy_files(source, Path(name), most_bytes, stop)
            digest = adapter_digest(Path(name))
            _publish(Path(name), cache_folder / digest)
            return digest

    return _within(timeout_s, fetch)


def _fetch(ref: AdapterRef, target: Path, most_bytes: int | None, stop: threading.Event) -> None:
    """Puts the adapter at `target`, or leaves nothing."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as name:
        folder = Path(name)
        _copy_files(ref.source, folder, most_bytes, stop)
        if (found := adapter_digest(folder)) != ref.digest:
            raise AdapterUnreadable(f"its source holds an adapter with digest {found[:12]}, not {ref.digest[:12]}")
        _publish(folder, target)


def _publish(folder: Path, target: Path) -> None:
    """The files of `folder` appear at `target` at once; what another fetch put there first stays."""
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
    """Removes what nobody has asked for in a long time, and what fetches that were killed have left."""
    oldest_s = time.time() - KEPT_S
    for entry in cache_folder.iterdir():
        with suppress(OSError):  # another process removes it too
            if entry.stat().st_mtime < oldest_s:
                if entry.is_dir():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()


def _copy_files(source: str, folder: Path, most_bytes: int | None, stop: threading.Event) -> None:
    """The adapter's two files. Whatever a file system's client raises is the source's fault, not ours."""
    try:
        import fsspec

        # a client of our own: those that fsspec keeps remember what was not there, and sizes of what was
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
    """In words, what a file system's client raises."""
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename or error}"
    if isinstance(error, ImportError) and source.startswith(S3):
        return "for S3, pip install 'tandem-serve[s3]' where gateways and ranks run"
    return f"{type(error).__name__}: {error}"


def _copy(remote: Any, local: Any, name: str, most_bytes: int | None, stop: threading.Event) -> int:
    """The bytes that were copied."""
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
    """What work(stop) returns or raises, on a thread that is left behind when it hangs, and then told to stop."""
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
    """One fetch of a digest at a time on a machine: its ranks want the same files at the same moment."""
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
