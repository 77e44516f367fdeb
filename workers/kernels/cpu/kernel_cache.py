"""Caches compiled kernels in the user's cache folder, so that the next process loads them instead of compiling.

A library's name is a digest of its sources, flags, compiler and CPU. A file appears whole or not at all, and is loaded
if it is whole and only its user could have written it. One process at a time compiles a library, while others compile
other ones: ranks that start together do not all do the same work. Without a usable folder each process compiles.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.configs.environment import kernel_cache_folder

log = logging.getLogger(__name__)
UNUSED_S = 60 * 86400
WAIT_S = 120.0
"""The longest wait for another process's compilation: that may have been stopped in the middle."""
POLL_S = 0.05
LOCK = "compiling.lock"
"""One empty file; each library has a byte of it to lock, far behind its end."""
FLOCK = struct.Struct("hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, process."""
DIGEST = hashlib.sha256().digest_size
CPU_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
"""Lines of /proc/cpuinfo that decide what -march=native means."""


def library_name(compiler: str, arguments: Sequence[str], sources: Iterable[Path]) -> str:
    """Returns the file name of the library that `compiler` makes of `sources` with `arguments` on this machine."""
    binary = os.stat(compiler)
    parts = [*arguments, os.path.realpath(compiler), str(binary.st_size), str(binary.st_mtime_ns), *_cpu_facts()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sources:
        digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return f"{digest.hexdigest()[:32]}.so"


def load_cached(name: str) -> ctypes.CDLL | None:
    """Loads the library of that name; None when there is none, or it is damaged or could be another user's."""
    try:
        descriptor = os.open(kernel_cache_folder() / name, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, RuntimeError):  # no such file, or a user without a home
        return None
    try:
        if not (_is_trusted(os.fstat(descriptor)) and _is_whole(descriptor)):
            raise OSError("its content has changed, or another user could have written it")
        with suppress(OSError):  # a cache that can only be read
            os.utime(descriptor)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")  # it stays open, so that the next one has another name
    except OSError as error:
        log.warning("%s cannot be loaded and is compiled again: %s", kernel_cache_folder() / name, error)
        os.close(descriptor)
        return None


@contextmanager
def compiling(
    name: str, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bool]:
    """Holds the right to compile the library of that name for this user; yields whether another process had it, which
    may have compiled the library. Waits for that one WAIT_S at most. Without a usable folder nobody waits."""
    descriptor = _open_lock()
    try:
        deadline_s, waited = clock() + WAIT_S, False
        while descriptor is not None and not _locked(descriptor, name) and clock() < deadline_s:
            waited = True
            sleep(POLL_S)
        yield waited
    finally:
        if descriptor is not None:
            os.close(descriptor)


def store(name: str, library: bytes) -> None:
    """Stores a library for later processes, in place of one that could not be loaded; a failure only costs them
    time."""
    try:
        folder = _made_folder()
        nameless = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)  # ends with this process unless it is linked
        try:
            with open(nameless, "wb", closefd=False) as file:
                file.write(library + hashlib.sha256(library).digest())
            os.fsync(nameless)
            (folder / name).unlink(missing_ok=True)
            # Python follows the link only when src_dir_fd is given, though it is unused here.
            os.link(f"/proc/self/fd/{nameless}", folder / name, src_dir_fd=nameless, follow_symlinks=True)
        finally:
            os.close(nameless)
        _remove_old(folder)
    except FileExistsError:
        pass  # another process that started at the same time was first
    except (OSError, RuntimeError) as error:
        log.info("compiled kernels are not cached for the next start: %s", error)


def _made_folder() -> Path:
    folder = kernel_cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _open_lock() -> int | None:
    """Returns a descriptor of the file that has the locks; None without a usable folder."""
    try:
        return os.open(_made_folder() / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, RuntimeError):
        return None


def _locked(descriptor: int, name: str) -> bool:
    """Returns whether this descriptor has the library's lock now, or there are no locks on this file system."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])  # a byte that only this library locks
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True
    return True


def _remove_old(folder: Path) -> None:
    """Removes libraries not loaded for UNUSED_S: of other versions, compilers, machines."""
    for library in folder.glob("*.so"):
        if library.stat().st_mtime < time.time() - UNUSED_S:
            library.unlink()


def _is_trusted(found: os.stat_result) -> bool:
    """Returns whether only this user could have written the file."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(descriptor: int) -> bool:
    """Returns whether the digest at the file's end, which loaders ignore, matches the content before it."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _cpu_facts() -> Iterator[str]:
    """Yields the facts of the first core."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                return
            if line.partition(":")[0].strip() in CPU_FACTS:
                yield line.strip()
