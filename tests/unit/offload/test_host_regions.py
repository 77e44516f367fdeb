"""Regions of host memory: free ones are reused, used ones never, and the budget is kept."""

import errno
import gc
import mmap
import os

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.offload.host import host_regions
from tandem.offload.host.host_messages import Attach, HostTierError, LeaseRegion
from tandem.offload.host.host_regions import Region, Regions

PAGE = 4096
BUDGET = 10 * PAGE


def ask(layout: str = "a", pages: int = 1, ranks: int = 2) -> LeaseRegion:
    """Takes pages * (1 + ranks) pages."""
    return LeaseRegion(layout, pages * PAGE, [pages * PAGE] * ranks)


def write(region: Region, content: bytes) -> None:
    with mmap.mmap(region.index, region.index_bytes) as memory:
        memory[: len(content)] = content


def read(region: Region, length: int) -> bytes:
    with mmap.mmap(region.index, region.index_bytes) as memory:
        return memory[:length]


@pytest.fixture
def regions():
    made = Regions(BUDGET)
    yield made
    made.close()


def left_free(regions: Regions, layout: str, pages: int = 1) -> Region:
    region, _ = regions.lease(1, ask(layout, pages))
    regions.release(1)
    return region


def test_a_free_region_is_given_again_with_its_content(regions):
    first, reused = regions.lease(1, ask())
    token = first.token
    assert not reused and read(first, PAGE) == bytes(PAGE)
    write(first, b"kept")
    regions.release(1)
    second, reused = regions.lease(2, ask())
    assert reused and read(second, 4) == b"kept" and second.token != token


@pytest.mark.parametrize("other", [ask("b"), ask("a", 2), ask("a", 1, 1)], ids=["layout", "sizes", "ranks"])
def test_another_shape_gets_other_memory(regions, other):
    write(left_free(regions, "a"), b"kept")
    region, reused = regions.lease(2, other)
    assert not reused and read(region, 4) == bytes(4)


def test_the_most_recently_freed_is_given_first(regions):
    one, _ = regions.lease(1, ask())
    two, _ = regions.lease(2, ask())
    regions.release(2)
    regions.release(1)
    assert regions.lease(3, ask())[0] is one
    assert regions.lease(4, ask())[0] is two


def test_the_least_recently_freed_is_evicted_first(regions):
    for layout in ("old", "middle", "new"):
        left_free(regions, layout)
    regions.lease(2, ask("large", 2))
    assert regions.status().regions == 2 and regions.status().bytes == 9 * PAGE
    assert regions.lease(3, ask("new"))[1], "the newest was kept"


def test_nothing_is_evicted_for_what_cannot_fit(regions):
    left_free(regions, "free")
    regions.lease(2, ask("held"))
    with pytest.raises(HostTierError, match=f"36864 bytes do not fit.*{BUDGET} bytes, 12288 are leased"):
        regions.lease(3, ask("large", 3))
    assert regions.status().regions == 2


def test_a_rank_keeps_the_region_from_a_successor(regions):
    region, _ = regions.lease(1, ask())
    regions.attach(2, Attach(region.token, 0))
    regions.release(1)
    other, reused = regions.lease(3, ask())
    assert other is not region and not reused
    regions.release(2)
    assert regions.lease(4, ask()) == (region, True)


def test_refused_attachments(regions):
    region, _ = regions.lease(1, ask())
    old_token = region.token
    for user, rank, token, reason in [
        (2, 2, old_token, "no rank 2"),
        (2, 0, "wrong", "no lease has this token"),
        (2, 0, "", "no lease has this token"),
        (1, 0, old_token, "holds a region already"),
    ]:
        with pytest.raises(HostTierError, match=reason):
            regions.attach(user, Attach(token, rank))
    regions.attach(2, Attach(old_token, 0))
    with pytest.raises(HostTierError, match="another process holds"):
        regions.attach(3, Attach(old_token, 0))
    with pytest.raises(HostTierError, match="holds a region already"):
        regions.lease(1, ask())
    regions.release(1)
    with pytest.raises(HostTierError, match="its coordinator has gone"):
        regions.attach(3, Attach(old_token, 1))
    regions.release(2)
    again, _ = regions.lease(4, ask())
    assert again is region
    with pytest.raises(HostTierError, match="no lease has this token"):
        regions.attach(5, Attach(old_token, 1))


def test_memory_that_is_short_takes_free_regions_and_then_refuses(regions, monkeypatch):
    left_free(regions, "free")
    available = iter([0, PAGE, 3 * PAGE, 0, 0])
    monkeypatch.setattr(host_regions, "available_bytes", lambda: next(available))
    regions.lease(2, ask("new"))
    assert regions.status().regions == 1
    with pytest.raises(HostTierError, match="bytes of memory are available"):
        regions.lease(3, ask("newer"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_a_failed_reservation_evicts_and_at_last_refuses(regions, monkeypatch, code):
    left_free(regions, "free")
    gc.collect()  # what earlier tests have left is not closed meanwhile
    reserve, failures, before = os.posix_fallocate, [2], len(os.listdir("/proc/self/fd"))

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        if failures[0]:
            failures[0] -= 1
            raise OSError(code, os.strerror(code))
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(HostTierError, match=os.strerror(code)):
        regions.lease(2, ask("new"))
    assert regions.status().regions == 0 and len(os.listdir("/proc/self/fd")) == before - 3
    regions.lease(2, ask("new"))


def test_there_is_a_limit_to_the_number_of_regions(monkeypatch):
    monkeypatch.setattr(host_regions, "MAX_REGIONS", 2)
    regions = Regions(100 * PAGE)
    for layout in ("a", "b", "c"):
        left_free(regions, layout)
    assert regions.status().regions == 2
    regions.lease(1, ask("b"))
    regions.lease(2, ask("c"))
    with pytest.raises(HostTierError, match="2 regions are leased"):
        regions.lease(3, ask("d"))
    regions.close()


def test_no_user_can_shrink_memory(regions):
    region, _ = regions.lease(1, ask())
    for size in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(region.index, size)


class RegionsMachine(RuleBasedStateMachine):
    """Each region is known by its index's inode; the model knows who holds which, and what was written last."""

    def __init__(self) -> None:
        super().__init__()
        self.regions = Regions(BUDGET)
        self.users: dict[int, int] = {}
        self.tokens: dict[int, tuple[int, str]] = {}
        self.content: dict[int, bytes] = {}
        self.last = 0

    def teardown(self) -> None:
        self.regions.close()

    @rule(layout=st.sampled_from("ab"), pages=st.integers(1, 3))
    def lease(self, layout, pages):
        self.last += 1
        held_bytes = self.regions.status().bytes
        try:
            region, reused = self.regions.lease(self.last, ask(layout, pages))
        except HostTierError:
            assert self.regions.status().bytes == held_bytes
            return
        inode = os.fstat(region.index).st_ino
        assert inode not in self.users.values(), "a region in use was given away"
        if reused:
            assert read(region, 16) == self.content[inode]
        else:
            assert read(region, 16) == bytes(16)
        self.content[inode] = f"{layout} {pages} {self.last}".encode().ljust(16)
        write(region, self.content[inode])
        self.users[self.last] = inode
        self.tokens[self.last] = (inode, region.token)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), rank=st.integers(0, 2))
    def attach(self, data, rank):
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        inode, token = self.tokens[owner]
        self.last += 1
        try:
            self.regions.attach(self.last, Attach(token, rank))
        except HostTierError:
            return
        assert rank < 2 and owner in self.users, "only while the coordinator lives"
        self.users[self.last] = inode

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def release(self, data):
        user = data.draw(st.sampled_from(sorted(self.users)))
        del self.users[user]
        self.regions.release(user)
        self.regions.release(user)

    @invariant()
    def agrees(self):
        status = self.regions.status()
        assert status.bytes <= BUDGET and status.users == len(self.users)
        assert status.leases == len(set(self.users.values())) <= status.regions


TestRegionsInvariants = RegionsMachine.TestCase
TestRegionsInvariants.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
