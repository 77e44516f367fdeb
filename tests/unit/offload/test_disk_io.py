"""Block files: content is read back or refused, and failures leave no files behind. Real files throughout."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.offload.kv.disk_io import (
    HEADER_BYTES,
    BlockMissing,
    CorruptBlock,
    DiskBlockError,
    file_bytes,
    list_blocks,
    read_block,
    remove_block,
    write_block,
)

KEY = bytes(range(16))
OTHER_KEY = bytes(range(1, 17))
LAYOUT = b"layout digest 16"
PAYLOAD = bytes(range(256)) * 3
ROOT = Path(__file__).resolve().parents[3]


def write(folder: Path, key: bytes = KEY, payload: bytes = PAYLOAD, layout: bytes = LAYOUT) -> int:
    return write_block(folder, key, layout, memoryview(payload))


def read(folder: Path, key: bytes = KEY, length: int = len(PAYLOAD), layout: bytes = LAYOUT) -> bytes:
    into = bytearray(length)
    read_block(folder, key, layout, memoryview(into))
    return bytes(into)


def place(folder: Path, key: bytes = KEY) -> Path:
    return folder / key.hex()[:2] / f"{key.hex()}.kv"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.binary(min_size=16, max_size=16), payload=st.binary(max_size=300))
def test_what_is_written_is_read(tmp_path, key, payload):
    assert write(tmp_path, key, payload) == file_bytes(len(payload)) == place(tmp_path, key).stat().st_size
    assert read(tmp_path, key, len(payload)) == payload


def test_views_of_any_item_size_are_bytes(tmp_path):
    written, into = memoryview(PAYLOAD).cast("f"), bytearray(len(PAYLOAD))
    write_block(tmp_path, KEY, LAYOUT, written)
    read_block(tmp_path, KEY, LAYOUT, memoryview(into).cast("d"))
    assert into == PAYLOAD


def test_a_second_write_replaces_the_first(tmp_path):
    write(tmp_path, payload=b"one")
    write(tmp_path, payload=b"three")
    assert read(tmp_path, length=5) == b"three"
    assert files(tmp_path) == [place(tmp_path)]


def test_only_the_user_can_read_blocks(tmp_path):
    write(tmp_path)
    assert place(tmp_path).stat().st_mode & 0o777 == 0o600
    assert place(tmp_path).parent.stat().st_mode & 0o777 == 0o700


def test_short_writes_and_reads_go_on(tmp_path, monkeypatch):
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, at: pwritev(fd, [parts[0][:7]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:5]], at))
    write(tmp_path)
    assert read(tmp_path) == PAYLOAD


def test_a_missing_block_is_told_apart(tmp_path):
    with pytest.raises(BlockMissing):
        read(tmp_path)
    write(tmp_path)
    with pytest.raises(BlockMissing):
        read(tmp_path, OTHER_KEY)
    assert issubclass(BlockMissing, DiskBlockError) and issubclass(CorruptBlock, DiskBlockError)


@pytest.mark.parametrize("position", range(HEADER_BYTES + 8))
def test_any_flipped_bit_is_found(tmp_path, position):
    write(tmp_path, payload=b"8 bytes.")
    data = bytearray(place(tmp_path).read_bytes())
    data[position] ^= 1 << position % 8
    place(tmp_path).write_bytes(data)
    with pytest.raises(CorruptBlock):
        read(tmp_path, length=8)
    assert not files(tmp_path), "a corrupt file is removed"
    with pytest.raises(BlockMissing):
        read(tmp_path, length=8)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 700, HEADER_BYTES + 769])
def test_a_file_of_another_length_is_corrupt(tmp_path, length):
    write(tmp_path)
    os.truncate(place(tmp_path), length)
    with pytest.raises(CorruptBlock, match="bytes, not"):
        read(tmp_path)
    assert not files(tmp_path)


def test_a_page_of_zeros_as_after_a_power_cut_is_corrupt(tmp_path):
    write(tmp_path, payload=b"x" * 8192)
    with place(tmp_path).open("r+b") as file:
        file.seek(4096)
        file.write(bytes(4096))
    with pytest.raises(CorruptBlock, match="checksum"):
        read(tmp_path, length=8192)


def test_another_layout_or_key_is_corrupt(tmp_path):
    write(tmp_path)
    with pytest.raises(CorruptBlock, match="layout"):
        read(tmp_path, layout=b"x" * 16)
    write(tmp_path)
    place(tmp_path, OTHER_KEY).parent.mkdir()
    place(tmp_path).rename(place(tmp_path, OTHER_KEY))
    with pytest.raises(CorruptBlock, match="key"):
        read(tmp_path, OTHER_KEY)


def test_removing_is_idempotent(tmp_path):
    remove_block(tmp_path, KEY)
    write(tmp_path)
    remove_block(tmp_path, KEY)
    remove_block(tmp_path, KEY)
    assert not files(tmp_path)


def test_the_list_holds_blocks_only_and_stale_files_go(tmp_path):
    write(tmp_path)
    write(tmp_path, OTHER_KEY, b"abc")
    os.utime(place(tmp_path), (5, 5))
    group = place(tmp_path).parent
    foreign = [group / "notes.txt", group / f"{'f' * 32}.kv", group / "00.kv", tmp_path / "LOCK", tmp_path / "x.tmp"]
    for path in (*foreign, group / f"{KEY.hex()}.kv.17-abc.tmp"):
        path.write_bytes(b"?")
    listed = {key: (size, used) for key, size, used in list_blocks(tmp_path)}
    assert listed.keys() == {KEY, OTHER_KEY}
    assert listed[KEY] == (file_bytes(len(PAYLOAD)), 5.0) and listed[OTHER_KEY][0] == file_bytes(3)
    assert set(files(tmp_path)) == {*foreign, place(tmp_path), place(tmp_path, OTHER_KEY)}


def test_reading_counts_as_use(tmp_path):
    write(tmp_path)
    os.utime(place(tmp_path), (5, 5))
    read(tmp_path)
    assert place(tmp_path).stat().st_mtime > 5


def test_reading_works_where_times_cannot_be_set(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(os, "utime", raising(errno.EROFS))
    assert read(tmp_path) == PAYLOAD


# ---- a disk that fails ----


def raising(code: int):
    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("old", [True, False], ids=["over an old block", "new"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("function", ["open", "pwritev", "close", "replace"])
def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch, function, code, old):
    if old:
        write(tmp_path)
    else:
        place(tmp_path).parent.mkdir()
    close = os.close

    def close_and_fail(descriptor: int) -> None:
        close(descriptor)
        raising(code)()

    with monkeypatch.context() as patch:
        patch.setattr(os, function, close_and_fail if function == "close" else raising(code))
        with pytest.raises(OSError) as caught:
            write(tmp_path, payload=b"later")
    assert caught.value.errno == code
    assert files(tmp_path) == ([place(tmp_path)] if old else [])
    if old:
        assert read(tmp_path) == PAYLOAD


@contextmanager
def largest_file(limit_bytes: int) -> Iterator[None]:
    """The kernel itself refuses bytes beyond the limit, after it has taken those below."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_half_way_leaves_nothing(tmp_path):
    with largest_file(200), pytest.raises(OSError, match="too large"):
        write(tmp_path)
    assert not files(tmp_path)
    write(tmp_path)
    assert read(tmp_path) == PAYLOAD


def test_a_folder_that_is_gone_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()


def test_a_failing_disk_is_no_corrupt_block(tmp_path, monkeypatch):
    write(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", raising(errno.EIO))
        with pytest.raises(OSError, match="Input/output"):
            read(tmp_path)
    assert read(tmp_path) == PAYLOAD, "the file is kept"


WRITER = """
import sys
from pathlib import Path
from tandem.offload.kv.disk_io import write_block
for number in range(10**9):
    key = (number % 50).to_bytes(16, "big")
    write_block(Path(sys.argv[1]), key, b"layout digest 16", memoryview(key * 65536))
    print(flush=True)
"""


@pytest.mark.parametrize("round_number", range(5))
def test_a_killed_writer_leaves_only_whole_blocks(tmp_path, round_number):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE)
    assert writer.stdout is not None
    for _ in range(20):
        writer.stdout.readline()
    time.sleep(0.001 * round_number)  # killed at another moment each round
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    keys = [key for key, _, _ in list_blocks(tmp_path)]
    assert len(keys) >= 20 and len(files(tmp_path)) == len(keys)
    for key in keys:
        assert read(tmp_path, key, 2**20) == key * 65536
