"""Files of KV blocks on disk: one block of one rank is one file, `<folder>/<first 2 hex of key>/<key hex>.kv`.

Called by the ranks (write, read, remove) and by the disk tier when it opens (list, remove); quota and order of use are
the tier's. A file appears whole or not at all while the machine stays up. After a power cut its checksum reveals a torn
file, so nothing is synced. No file stays open between calls.

    file: magic 16 | version u32 | layout 16 | key 16 | payload length u64 | crc32 u32 | payload      (little-endian)
"""

import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.configs.errors import TandemError
from tandem.offload.kv.block_key import KEY_BYTES

LAYOUT_BYTES = 16
SUFFIX = ".kv"
TEMPORARY_SUFFIX = ".tmp"
_MAGIC = b"tandem kv block\n"
_VERSION = 1
_FIELDS = struct.Struct(f"<{len(_MAGIC)}sI{LAYOUT_BYTES}s{KEY_BYTES}sQ")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class DiskBlockError(TandemError):
    """A block could not be read from disk. Its reader treats this as a miss; the request goes on."""


class BlockMissing(DiskBlockError):
    """There is no file of this key."""


class CorruptBlock(DiskBlockError):
    """The file differs from what was written, or has another layout. It has been removed."""


def file_bytes(payload_bytes: int) -> int:
    """Returns the size of the file that holds a payload."""
    return HEADER_BYTES + payload_bytes


def write_block(folder: Path, key: bytes, layout: bytes, data: memoryview) -> int:
    """Writes one block and returns the bytes of its file. `layout` is a digest of 16 bytes; `data` is contiguous.

    `folder` must exist. OSError (disk full, read-only, not allowed, broken) leaves an earlier file in place and no
    temporary one.
    """
    payload = data.cast("B")
    place = _place(folder, key)
    temporary = f"{place}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    descriptor = _create(temporary)
    try:
        try:
            _write_whole(descriptor, [memoryview(_header(key, layout, payload)), payload])
        finally:
            os.close(descriptor)  # inside the try: some file systems report a full disk only here
        os.replace(temporary, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return file_bytes(payload.nbytes)


def read_block(folder: Path, key: bytes, layout: bytes, into: memoryview) -> None:
    """Reads the payload into `into` (contiguous, writable) and sets the file's time to now, as its last use.

    BlockMissing or CorruptBlock leave `into` with undefined content. OSError when the disk itself fails.
    """
    place = _place(folder, key)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise BlockMissing(f"no file {place}") from None
    try:
        wrong = _read_checked(descriptor, key, layout, into.cast("B"))
        if wrong is None:
            with suppress(OSError):  # the order of use is a hint
                os.utime(descriptor)
    finally:
        os.close(descriptor)
    if wrong is not None:
        with suppress(OSError):
            os.unlink(place)
        raise CorruptBlock(f"{place}: {wrong}")


def remove_block(folder: Path, key: bytes) -> None:
    """Removes the block's file, if there is one."""
    with suppress(FileNotFoundError):
        os.unlink(_place(folder, key))


def list_blocks(folder: Path) -> Iterator[tuple[bytes, int, float]]:
    """Yields (key, file bytes, time of last use) of every block in `folder`, unchecked and in no order.

    Removes temporary files of writers that died, so only the owner of the folder may call it, before it writes. Foreign
    files are left alone.
    """
    for group in os.scandir(folder):
        if not (_is_hex(group.name, 1) and group.is_dir(follow_symlinks=False)):
            continue
        for entry in os.scandir(group):
            if entry.name.endswith(TEMPORARY_SUFFIX):
                with suppress(FileNotFoundError):
                    os.unlink(entry)
                continue
            name = entry.name.removesuffix(SUFFIX)
            if name == entry.name or not _is_hex(name, KEY_BYTES) or not name.startswith(group.name):
                continue
            with suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield bytes.fromhex(name), found.st_size, found.st_mtime


def _place(folder: Path, key: bytes) -> str:
    name = key.hex()
    return f"{folder}/{name[:2]}/{name}{SUFFIX}"


def _is_hex(name: str, num_bytes: int) -> bool:
    return len(name) == 2 * num_bytes and all(c in "0123456789abcdef" for c in name)


def _header(key: bytes, layout: bytes, payload: memoryview) -> bytes:
    assert len(key) == KEY_BYTES and len(layout) == LAYOUT_BYTES
    fields = _FIELDS.pack(_MAGIC, _VERSION, layout, key, payload.nbytes)
    return fields + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(fields)))


def _create(path: str) -> int:
    """Creates a file that only this user can read, since KV reveals a tenant's text."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        return os.open(path, flags, 0o600)


def _write_whole(descriptor: int, parts: list[memoryview]) -> None:
    offset = 0
    while parts:
        written = os.pwritev(descriptor, parts, offset)
        offset += written
        parts = _after(parts, written)


def _read_whole(descriptor: int, parts: list[memoryview]) -> bool:
    """Reads into `parts`; returns False when the file ends early."""
    offset = 0
    while parts:
        count = os.preadv(descriptor, parts, offset)
        if count == 0:
            return False
        offset += count
        parts = _after(parts, count)
    return True


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """Returns the rest of `parts` after the first `count` bytes."""
    left = []
    for part in parts:
        done = min(count, part.nbytes)
        count -= done
        if done < part.nbytes:
            left.append(part[done:])
    return left


def _read_checked(descriptor: int, key: bytes, layout: bytes, into: memoryview) -> str | None:
    """Reads and checks the file. Returns None when `into` holds its payload, else the reason why it does not."""
    size = os.fstat(descriptor).st_size
    if size != file_bytes(into.nbytes):
        return f"{size} bytes, not {file_bytes(into.nbytes)}"
    header = bytearray(HEADER_BYTES)
    if not _read_whole(descriptor, [memoryview(header), into]):
        return "it became shorter while it was read"
    expected = (_MAGIC, _VERSION, layout, key, into.nbytes)
    for name, wanted, there in zip(
        ("magic", "version", "layout", "key", "payload length"), expected, _FIELDS.unpack_from(header), strict=True
    ):
        if wanted != there:
            return f"another {name}"
    checksum = zlib.crc32(into, zlib.crc32(memoryview(header)[: _FIELDS.size]))
    return None if _CHECKSUM.unpack_from(header, _FIELDS.size)[0] == checksum else "the checksum does not match"
