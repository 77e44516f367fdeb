"""The disk tier's index against a naive model, and its recovery of blocks from real folders."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.configs.errors import SettingsError
from tandem.offload.kv import disk_tier
from tandem.offload.kv.disk_io import file_bytes, list_blocks, read_block, write_block
from tandem.offload.kv.disk_tier import DiskTier, open_disk_tier

ROOT = Path(__file__).resolve().parents[3]
LAYOUT = b"layout digest 16"
RANKS = ["tp0pp0", "tp1pp0"]
PAYLOAD_BYTES = 100
BLOCK_BYTES = 2 * file_bytes(PAYLOAD_BYTES)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


KEYS = st.integers(0, 9).map(key)


class DiskTierMachine(RuleBasedStateMachine):
    """`order` is a list of what can be found, least recently used first; `files` is what ranks may have on disk."""

    @initialize(capacity=st.integers(1, 5), there=st.lists(KEYS, unique=True, max_size=5))
    def start(self, capacity, there):
        self.capacity, self.order = capacity, there[:capacity]
        self.tier = DiskTier(Path("/nowhere"), capacity, 10, self.order)
        self.reads: dict[bytes, int] = {}
        self.writing: set[bytes] = set()
        self.files = set(self.order)
        self.disabled = False
        self.told = set(self.order)
        self.tier.on_change = self.note_change

    def note_change(self, k):
        (self.told.add if self.tier.has(k) else self.told.discard)(k)

    def evictable(self) -> list[bytes]:
        return [k for k in self.order if not self.reads.get(k)]

    def used(self) -> int:
        return len({*self.order, *self.reads, *self.writing})

    @rule(k=KEYS)
    def touch(self, k):
        self.tier.touch(k)
        if k in self.order and k not in self.reads:
            self.order.remove(k)
            self.order.append(k)

    @rule(k=KEYS)
    def prepare_store(self, k):
        busy = k in self.order or k in self.reads or k in self.writing
        full = self.used() >= self.capacity
        removed = self.tier.prepare_store(k)
        if self.disabled or busy or (full and not self.evictable()):
            assert removed is None
            return
        assert removed is not None
        assert not set(removed) & {k, *self.reads, *self.writing}, "files in use are never removed"
        if full:
            victim = self.evictable()[0]
            self.order.remove(victim)
            assert victim in removed
        assert not set(removed) & set(self.order), "nothing that is found is removed"
        self.files -= set(removed)
        self.writing.add(k)
        self.files.add(k)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), well=st.booleans())
    def end_store(self, data, well):
        k = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.remove(k)
        (self.tier.complete_store if well else self.tier.fail_store)(k)
        if well and not self.disabled:
            self.order.append(k)

    @rule(k=KEYS)
    def prepare_load(self, k):
        assert self.tier.prepare_load(k) == (k in self.order)
        if k in self.order:
            self.reads[k] = self.reads.get(k, 0) + 1

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), well=st.booleans())
    def end_load(self, data, well):
        k = data.draw(st.sampled_from(sorted(self.reads)))
        (self.tier.complete_load if well else self.tier.fail_load)(k)
        if not well and k in self.order:
            self.order.remove(k)
        self.reads[k] -= 1
        if not self.reads[k]:
            del self.reads[k]
            if k in self.order:
                self.order.remove(k)
                self.order.append(k)

    @precondition(lambda self: not self.disabled)
    @rule(really=st.integers(0, 9))
    def disable(self, really):
        if really:
            return
        self.tier.disable("disk full")
        self.tier.disable("again")
        assert self.tier.disabled_reason == "disk full"
        self.disabled = True
        self.order.clear()

    @rule(really=st.integers(0, 4))
    def forget_all(self, really):
        if not really:
            self.tier.forget_all()
            self.order.clear()

    @invariant()
    def agrees(self):
        self.tier.check_invariants()
        assert {k for k in map(key, range(10)) if self.tier.has(k)} == set(self.order) == self.told
        assert self.tier.stats.keys == len(self.order) and self.tier.stats.bytes == 10 * len(self.order)
        assert len(self.files) <= self.capacity, "more files than the quota allows"


TestDiskTierInvariants = DiskTierMachine.TestCase
TestDiskTierInvariants.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_the_least_recently_used_goes_first_and_reads_are_pins():
    tier = DiskTier(Path("/nowhere"), 2, 10, [key(1), key(2)])
    assert tier.prepare_load(key(1))
    assert tier.prepare_store(key(3)) == [key(2)]
    assert tier.prepare_store(key(4)) is None, "one is read, one is written"
    tier.complete_store(key(3))
    tier.complete_load(key(1))
    assert tier.prepare_store(key(4)) == [key(3)], "the read made 1 the most recently used"


def test_a_corrupt_block_is_forgotten_and_its_other_files_are_removed_before_the_next_write():
    tier = DiskTier(Path("/nowhere"), 2, 10, [key(1)])
    assert tier.prepare_load(key(1)) and tier.prepare_load(key(1))
    tier.fail_load(key(1))
    assert not tier.has(key(1)) and not tier.prepare_load(key(1))
    assert tier.prepare_store(key(1)) is None, "the other read is still under way"
    assert tier.prepare_store(key(2)) == []
    tier.complete_load(key(1))
    assert tier.prepare_store(key(3)) == [key(1)]
    assert tier.stats.failures == 1


def test_a_failed_write_may_be_tried_again():
    tier = DiskTier(Path("/nowhere"), 2, 10)
    assert tier.prepare_store(key(1)) == []
    tier.fail_store(key(1))
    assert not tier.has(key(1))
    assert tier.prepare_store(key(1)) == [], "the new file takes the place of what was left"
    tier.complete_store(key(1))
    assert tier.has(key(1))


def test_switched_off_it_finds_nothing_not_even_what_is_being_read():
    tier = DiskTier(Path("/nowhere"), 3, 10, [key(1), key(2)])
    assert tier.prepare_load(key(1)) and tier.prepare_store(key(3)) == []
    tier.disable("full")
    assert not any(tier.has(key(number)) for number in (1, 2, 3)) and tier.stats.keys == 0
    tier.check_invariants()
    tier.complete_load(key(1))
    tier.complete_store(key(3))
    assert not any(tier.has(key(number)) for number in (1, 2, 3)) and tier.stats.stores == 0
    assert tier.prepare_store(key(4)) is None
    tier.check_invariants()


def test_the_picture_counts_what_happened():
    tier = DiskTier(Path("/nowhere"), 2, 10, [key(1), key(2)])
    assert tier.prepare_store(key(3)) == [key(1)] and tier.prepare_load(key(2)) and tier.prepare_load(key(2))
    tier.complete_store(key(3))
    tier.fail_load(key(2))
    assert tier.stats.keys == 1, "what is read still, but found no more, is not counted"
    tier.complete_load(key(2))
    assert tier.prepare_store(key(4)) == [key(2)]
    tier.fail_store(key(4))
    stats = tier.stats
    assert (stats.keys, stats.bytes, stats.capacity_keys) == (1, 10, 2)
    assert (stats.hits, stats.stores, stats.evictions, stats.failures) == (2, 1, 1, 2)
    with pytest.raises(AttributeError):
        stats.hits = 0


# ---- real folders ----


def opened(root: Path, *, blocks: int = 10, ranks: list[str] = RANKS, layout: str = "abc") -> DiskTier:
    return open_disk_tier(root, layout, ranks, blocks * BLOCK_BYTES, BLOCK_BYTES)


def store(tier: DiskTier, k: bytes, ranks: list[str] = RANKS) -> None:
    removed = tier.prepare_store(k)
    assert removed == []
    for rank in ranks:
        write_block(tier.folder(rank), k, LAYOUT, memoryview(bytes(PAYLOAD_BYTES)))
    tier.complete_store(k)


def used_at(tier: DiskTier, k: bytes, when: int) -> None:
    for rank in RANKS:
        os.utime(tier.folder(rank) / k.hex()[:2] / f"{k.hex()}.kv", (when, when))


def keys_on_disk(folder: Path) -> set[bytes]:
    return {k for k, _, _ in list_blocks(folder)}


def test_what_was_stored_is_found_again_in_order_of_use(tmp_path):
    tier = opened(tmp_path)
    for number, when in [(1, 30), (2, 10), (3, 20)]:
        store(tier, key(number))
        used_at(tier, key(number), when)
    tier.close()
    assert not tier.has(key(1))

    again = opened(tmp_path, blocks=3)
    assert again.place == tier.place and again.stats.keys == 3 and again.stats.bytes == 3 * BLOCK_BYTES
    assert again.prepare_store(key(4)) == [key(2)]
    assert again.prepare_store(key(5)) == [key(3)]
    into = bytearray(PAYLOAD_BYTES)
    read_block(again.folder(RANKS[1]), key(1), LAYOUT, memoryview(into))
    again.close()


def test_incomplete_blocks_are_removed_at_open(tmp_path):
    tier = opened(tmp_path)
    for number in (1, 2, 3):
        store(tier, key(number))
    (tier.folder(RANKS[0]) / "00" / f"{key(2).hex()}.kv").unlink()
    os.truncate(tier.folder(RANKS[1]) / "00" / f"{key(3).hex()}.kv", 5)
    tier.close()
    again = opened(tmp_path)
    assert again.has(key(1)) and not again.has(key(2)) and not again.has(key(3))
    assert keys_on_disk(again.folder(RANKS[0])) == keys_on_disk(again.folder(RANKS[1])) == {key(1)}
    again.close()


def test_a_smaller_quota_removes_the_least_recently_used(tmp_path):
    tier = opened(tmp_path)
    for number in range(6):
        store(tier, key(number))
        used_at(tier, key(number), 100 - number)
    tier.close()
    again = opened(tmp_path, blocks=2)
    assert keys_on_disk(again.folder(RANKS[0])) == keys_on_disk(again.folder(RANKS[1])) == {key(0), key(1)}
    assert again.has(key(0)) and again.has(key(1)) and again.stats.capacity_keys == 2
    again.close()


def test_two_groups_never_share_a_folder_and_layouts_are_apart(tmp_path):
    first, second, other = opened(tmp_path), opened(tmp_path), opened(tmp_path, layout="def")
    assert len({first.place, second.place, other.place}) == 3
    store(first, key(1))
    assert not second.has(key(1))
    first.close()
    third = opened(tmp_path)
    assert third.place == first.place and third.has(key(1))
    for tier in (second, third, other):
        tier.close()


HOLDER = """
import sys, time
from pathlib import Path
from tandem.offload.kv.disk_tier import open_disk_tier
tier = open_disk_tier(Path(sys.argv[1]), "abc", ["tp0pp0", "tp1pp0"], 10**6, int(sys.argv[2]))
print(tier.place, flush=True)
time.sleep(60)
"""


def test_a_killed_owner_frees_its_folder_at_once(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path), str(BLOCK_BYTES)]
    holder = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    place = Path(holder.stdout.readline().strip())
    while_it_lives = opened(tmp_path)
    assert while_it_lives.place != place
    holder.kill()
    holder.wait()
    holder.stdout.close()
    successor = opened(tmp_path)
    assert successor.place == place
    successor.close()
    while_it_lives.close()


def test_too_many_groups_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier, "MAX_GROUPS", 2)
    tiers = [opened(tmp_path), opened(tmp_path)]
    with pytest.raises(SettingsError, match="2 groups use this folder"):
        opened(tmp_path)
    for tier in tiers:
        tier.close()


def test_a_quota_below_one_block_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="holds no KV block") as caught:
        opened(tmp_path, blocks=0)
    assert caught.value.flag == "--kv-disk-path"


def test_a_quota_of_one_block_holds_one(tmp_path):
    tier = opened(tmp_path, blocks=1)
    store(tier, key(1))
    assert tier.prepare_store(key(2)) == [key(1)]
    tier.close()


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be used"):
        opened(tmp_path / "file")


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_refused_and_not_held(tmp_path, monkeypatch, code):
    def fail(path: Path, _data: bytes) -> int:
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fail)
        with pytest.raises(SettingsError, match=os.strerror(code)) as caught:
            opened(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path / "abc" / "0" / RANKS[0]) in str(caught.value)
    tier = opened(tmp_path)
    assert tier.place.name == "0"
    tier.close()


def test_switched_off_is_said_once_with_flag_place_and_reason_and_an_ordinary_end_is_not(tmp_path, caplog):
    tier = opened(tmp_path)
    tier.disable("[Errno 28] No space left on device")
    tier.disable("[Errno 5] Input/output error")
    tier.close()
    (line,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert all(part in line.getMessage() for part in ("--kv-disk-path", str(tier.place), "No space left on device"))
    caplog.clear()
    opened(tmp_path).close()
    assert not caplog.records


def test_a_new_folder_is_made_with_those_above_it_and_holds_nothing_of_the_trial(tmp_path):
    tier = opened(tmp_path / "some" / "where")
    assert tier.place == tmp_path / "some" / "where" / "abc" / "0"
    for rank in RANKS:
        assert tier.folder(rank).is_dir() and not list(tier.folder(rank).iterdir())
    tier.close()


def test_what_is_there_already_counts_as_part_of_the_quota(tmp_path, monkeypatch):
    tier = opened(tmp_path, blocks=4)
    store(tier, key(1))
    tier.close()
    for lacking, notes in ((0, 0), (1, 1)):
        free = SimpleNamespace(free=3 * BLOCK_BYTES - lacking)
        monkeypatch.setattr(disk_tier.shutil, "disk_usage", lambda _, free=free: free)
        again = opened(tmp_path, blocks=4)
        assert len(again.notes) == notes
        again.close()


def test_a_note_says_how_much_is_free_and_how_much_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_tier.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 * 2**29))
    tier = open_disk_tier(tmp_path, "abc", RANKS, 5 * 2**29, BLOCK_BYTES)
    assert "1.5 GiB free, the quota may take 2.5 GiB more" in tier.notes[0]
    tier.close()


def test_a_quota_larger_than_the_disk_is_noted(tmp_path):
    tier = open_disk_tier(tmp_path, "abc", RANKS, 2**60, BLOCK_BYTES)
    assert len(tier.notes) == 1 and "GiB free" in tier.notes[0]
    tier.close()
    modest = opened(tmp_path)
    assert not modest.notes
    modest.close()


def num_open(files: set[Path]) -> int:
    """How often this process has these files open."""
    wanted, count = {(p.stat().st_dev, p.stat().st_ino) for p in files}, 0
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            count += (status.st_dev, status.st_ino) in wanted
    return count


def test_a_group_keeps_only_its_own_lock_open(tmp_path):
    """The locks that others hold are tried and let go, and its own with the tier."""
    tiers = [opened(tmp_path) for _ in range(3)]
    locks = {tier.place / "LOCK" for tier in tiers}
    assert len(locks) == 3 and num_open(locks) == 3
    for tier in tiers:
        tier.close()
    assert num_open(locks) == 0


def test_a_lock_that_cannot_be_tried_is_not_left_open(tmp_path, monkeypatch):
    def fail(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(disk_tier.fcntl, "flock", fail)
        with pytest.raises(SettingsError, match="cannot be used"):
            opened(tmp_path)
    assert num_open({tmp_path / "abc" / "0" / "LOCK"}) == 0
