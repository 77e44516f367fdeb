"""Compiled kernels that this user's next processes load instead of compiling them again, in the user's cache folder.

A library is named after everything that it was made from: sources, flags, compiler and CPU. It appears whole or not at
all, and is loaded only if it is whole and nobody but its user could have written it. Where it cannot be kept it is
compiled each time.
"""

import ctypes
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from configs.environment import kernel_cache_folder

log = logging.getLogger(__name__)
UNUSED_S = 60 * 86400
DIGEST = hashlib.sha256().digest_size
CPU_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
"""Lines of /proc/cpuinfo that decide what -march=native means."""


def library_name(compiler: str, arguments: Sequence[str], sources: Iterable[Path]) -> str:
    """Name of the file for what `compiler` makes of `sources` with `arguments` on this machine."""
    binary = os.stat(compiler)
    parts = [*arguments, os.path.realpath(compiler), str(binary.st_size), str(binary.st_mtime_ns), *_cpu()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sources:
        digest.update(f"\0{source.name}\0".encode() + source.read_bytes())
    return f"{digest.hexdigest()[:32]}.so"


def load_kept(name: str) -> ctypes.CDLL | None:
    """The library of that name; None when there is none, or none that may be loaded."""
    try:
        descriptor = os.open(kernel_cache_folder() / name, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, RuntimeError):  # there is none; a user without a home
        return None
    try:
        if not (_is_own(os.fstat(descriptor)) and _is_whole(descriptor)):
            raise OSError("it is not what was kept")
        with suppress(OSError):  # a cache that can only be read
            os.utime(descriptor)
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")  # it stays open: the next one must have another name
    except OSError as error:
        log.warning("%s cannot be loaded and is made again: %s", kernel_cache_folder() / name, error)
        os.close(descriptor)
        return None


def keep(name: str, library: bytes) -> None:
    """For the next process, if it can be, instead of one that could not be loaded: a full disk or a file system without
    nameless files only costs time."""
    try:
        folder = kernel_cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        nameless = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)  # gone with this process until it has a name
        try:
            with open(nameless, "wb", closefd=False) as file:
                file.write(library + hashlib.sha256(library).digest())
            os.fsync(nameless)
            (folder / name).unlink(missing_ok=True)
            # a folder given, if only to be ignored, is what makes Python follow the link
            os.link(f"/proc/self/fd/{nameless}", folder / name, src_dir_fd=nameless, follow_symlinks=True)
        finally:
            os.close(nameless)
        _forget_old(folder)
    except FileExistsError:
        pass  # another process of the same start was first
    except (OSError, RuntimeError) as error:
        log.info("compiled kernels are not kept for the next start: %s", error)


def _forget_old(folder: Path) -> None:
    """Libraries that nobody has loaded for long: of other versions, compilers, machines."""
    for library in folder.glob("*.so"):
        if library.stat().st_mtime < time.time() - UNUSED_S:
            library.unlink()


def _is_own(found: os.stat_result) -> bool:
    """Nobody else could have written it."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_whole(descriptor: int) -> bool:
    """The digest at its end, which no loader minds, is of what is before it. Loading damage would end the process."""
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    return hashlib.sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def _cpu() -> Iterator[str]:
    """Of the first core."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                return
            if line.partition(":")[0].strip() in CPU_FACTS:
                yield line.strip()
