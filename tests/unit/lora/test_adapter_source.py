"""Where adapters come from: folders as they are, URLs through a cache that is addressed by content."""

import io
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tandem.workers.lora.peft import adapter_source
from tandem.workers.lora.peft.adapter_source import KEPT_S, local_folder, remote_digest
from tandem.workers.lora.peft.peft_folder import CONFIG_FILE, WEIGHT_FILE, adapter_digest
from tandem.workers.messages.errors import AdapterRefused
from tandem.workers.messages.request import AdapterRef

PIRATE = Path(__file__).resolve().parents[3] / "configs" / "demo" / "adapters" / "pirate"
DIGEST = adapter_digest(PIRATE)
OTHER_DIGEST = adapter_digest(PIRATE.parent / "shout")
MOST_BYTES = 2**30


@pytest.fixture
def memory_url() -> Iterator[str]:
    """The pirate, in fsspec's memory file system."""
    files = fsspec.filesystem("memory")
    for name in (CONFIG_FILE, WEIGHT_FILE):
        files.pipe(f"/bucket/pirate/{name}", (PIRATE / name).read_bytes())
    yield "memory://bucket/pirate"
    files.rm("/bucket", recursive=True)


def ref(source: str, digest: str = DIGEST) -> AdapterRef:
    return AdapterRef(name="pirate", digest=digest, source=source)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_used_where_it_is(tmp_path: Path) -> None:
    assert local_folder(ref(str(PIRATE)), tmp_path) == PIRATE
    assert not names(tmp_path)
    with pytest.raises(AdapterRefused, match="not a folder"):
        local_folder(ref(str(tmp_path / "none")), tmp_path)


def test_a_url_is_fetched_once_and_found_by_its_content(tmp_path: Path, memory_url: str) -> None:
    folder = local_folder(ref(memory_url), tmp_path / "cache")
    assert folder.name == DIGEST and names(folder) == {CONFIG_FILE, WEIGHT_FILE} and adapter_digest(folder) == DIGEST
    assert local_folder(ref("memory://bucket/gone"), tmp_path / "cache") == folder, "the content decides, not the place"
    assert names(tmp_path / "cache") == {DIGEST, f"{DIGEST}.lock"}


def test_what_was_not_used_for_long_makes_room(tmp_path: Path, memory_url: str) -> None:
    local_folder(ref(memory_url), tmp_path)
    for name, age_s in (("f" * 64, 2 * KEPT_S), ("fetching-x-whole", 2 * KEPT_S), ("e" * 64, KEPT_S / 2)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    os.utime(tmp_path / DIGEST, (0, 0))
    local_folder(ref(memory_url), tmp_path)  # used again: it stays
    fetch_another(tmp_path)
    assert names(tmp_path) == {DIGEST, f"{DIGEST}.lock", OTHER_DIGEST, f"{OTHER_DIGEST}.lock", "e" * 64}


def fetch_another(cache: Path) -> None:
    source = f"file://{PIRATE.parent / 'shout'}"
    local_folder(AdapterRef(name="shout", digest=OTHER_DIGEST, source=source), cache)


def test_the_digest_of_a_url_leaves_the_files_to_be_served(tmp_path: Path, memory_url: str) -> None:
    assert (
        remote_digest(memory_url, tmp_path, most_bytes=MOST_BYTES)
        == DIGEST
        == remote_digest(memory_url, tmp_path, most_bytes=MOST_BYTES)
    )
    assert names(tmp_path) == {DIGEST}
    assert local_folder(ref("memory://bucket/gone"), tmp_path) == tmp_path / DIGEST


def test_other_content_is_refused_and_leaves_nothing(tmp_path: Path, memory_url: str) -> None:
    with pytest.raises(AdapterRefused, match=f"holds an adapter with digest {DIGEST[:12]}, not 000000000000"):
        local_folder(ref(memory_url, "0" * 64), tmp_path)
    assert names(tmp_path) == {f"{'0' * 64}.lock"}


@pytest.mark.parametrize("source", ["memory://bucket/none", "nosuchprotocol://x/y", "s3://"])
def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(AdapterRefused, match="cannot be read"):
        local_folder(ref(source), tmp_path)


def test_a_weight_file_that_is_too_large_is_not_fetched_whole(tmp_path: Path, memory_url: str) -> None:
    with pytest.raises(AdapterRefused, match=f"{WEIGHT_FILE} has more than 1000 bytes"):
        local_folder(ref(memory_url), tmp_path, most_bytes=1000)
    with pytest.raises(AdapterRefused, match=f"{WEIGHT_FILE} has more than 1000 bytes"):
        remote_digest(memory_url, tmp_path, most_bytes=1000)
    assert names(tmp_path) == {f"{DIGEST}.lock"}


def test_ranks_that_want_the_same_files_fetch_them_once(
    tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    whole = adapter_source._copy_files

    def counted(source: str, *rest: Any) -> None:
        fetched.append(source)
        whole(source, *rest)

    monkeypatch.setattr(adapter_source, "_copy_files", counted)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: local_folder(ref(memory_url), tmp_path), range(4)))
    assert folders == {tmp_path / DIGEST} and len(fetched) == 1


def test_a_source_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(adapter_source, "_copy_files", lambda *_: go_on.wait(60))
    started_s = time.monotonic()
    with pytest.raises(AdapterRefused, match=r"has not delivered it within 0\.2 s"):
        local_folder(ref("memory://bucket/pirate"), tmp_path, timeout_s=0.2)
    assert time.monotonic() - started_s < 30
    go_on.set()


class Slow:
    """A source that always has one more byte, after a while."""

    def read(self, _: int) -> bytes:
        time.sleep(0.01)  # this source is slow
        return b"x"


def test_a_download_that_was_given_up_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def copy(_: str, __: Path, most_bytes: int | None, stop: threading.Event) -> None:
        try:
            adapter_source._copy(Slow(), io.BytesIO(), WEIGHT_FILE, most_bytes, stop)
        finally:
            ended.set()

    monkeypatch.setattr(adapter_source, "_copy_files", copy)
    with pytest.raises(AdapterRefused, match="has not delivered it"):
        remote_digest("memory://bucket/pirate", tmp_path, most_bytes=2000, timeout_s=0.1)
    assert ended.wait(30)


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path, memory_url: str) -> None:
    shutil.copy(PIRATE / CONFIG_FILE, tmp_path / "file")
    with pytest.raises(AdapterRefused, match="cannot be written"):
        local_folder(ref(memory_url), tmp_path / "file" / "cache")
