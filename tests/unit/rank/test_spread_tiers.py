"""The host tier of a group whose ranks are on two nodes: each slab is on its rank's node, and the next group finds both
or neither."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tandem.configs.schema import CacheSettings, EngineSettings, ModelSettings
from tandem.offload.copies.host_slab import HostSlab
from tandem.offload.host.host_process import HostProcess, status
from tandem.offload.kv.tiered_store import TieredStore
from tandem.workers.executor import tiers as tiers_module
from tandem.workers.executor.tiers import OpenTiers, open_tiers
from tandem.workers.messages.handshake import RankLoaded, RankTiers
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank.transfers.kv_lanes import open_kv_lanes, open_slab
from tandem.workers.rank.transfers.lanes import Lanes
from tests.support.service import wait_for

BLOCK = 4096
SLOTS = 4
SETTINGS = EngineSettings(
    model=ModelSettings(model="m"), cache=CacheSettings(kv_offloading_gib=3.5 * SLOTS * BLOCK / 2**30)
)
RANK = RankLoaded(
    rank=0, num_blocks=8, weight_bytes=1, block_bytes=BLOCK, device="cpu", dtype="float32", threads=1, load_s=0.1,
    is_in_host_memory=True,
)  # fmt: skip
LOADED = [RANK, msgspec.structs.replace(RANK, rank=1), msgspec.structs.replace(RANK, rank=2)]
HOSTS = ["near", "near", "far"]
KEYS = [bytes([number]) * 16 for number in (1, 2)]


class Nodes:
    """Two nodes with a host-tier process each."""

    def __init__(self, folder: Path) -> None:
        self.tiers = {host: HostProcess(folder / host, 2**20) for host in ("near", "far")}
        for tier in self.tiers.values():
            tier.start()

    @property
    def sockets(self) -> dict[str, str]:
        return {host: str(tier.socket_path) for host, tier in self.tiers.items()}

    def regions(self) -> dict[str, tuple[int, int]]:
        """Of each node: bytes, and connections."""
        found = {host: status(tier.socket_path, 30.0) for host, tier in self.tiers.items()}
        return {host: (one.bytes, one.users) for host, one in found.items()}


class Life:
    """A group's tiers, from its start to its end."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        opened = open_tiers(SETTINGS, LOADED, [0] * 3, HOSTS, nodes.sockets)
        assert isinstance(opened, OpenTiers), opened
        self.opened = opened
        self.slabs: list[HostSlab] = []
        self.has_earlier: list[bool] = []

    def open_ranks(self) -> None:
        accelerator = CpuPlatform().accelerator
        for rank, own in enumerate(self.opened.ranks):
            slab, has_earlier = open_slab(rank, own, BLOCK, accelerator)
            self.slabs.append(slab)
            self.has_earlier.append(has_earlier)

    def begin(self) -> TieredStore:
        self.open_ranks()
        store, self.notes = self.opened.build(all(self.has_earlier))
        return store

    def end(self) -> None:
        """As the kernel does when its processes are gone, killed or not."""
        before = self._users()
        for slab in self.slabs:
            slab.close()
            for held in slab._owner:  # type: ignore[attr-defined]
                if held is not None:
                    slab.bytes_SB = None  # type: ignore[assignment]
                    held.close()
        self.opened.close()
        wait_for(
            lambda: before - self._users() == 5, 30, "those of the coordinator, three ranks, and the far lease end"
        )

    def _users(self) -> int:
        return sum(users for _, users in self.nodes.regions().values())


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(tiers_module, "layout_digest", lambda *_: bytes(16))
    nodes = Nodes(tmp_path)
    yield nodes
    for tier in nodes.tiers.values():
        tier.stop()


def kept(store: TieredStore) -> set[bytes]:
    return {key for key in KEYS if store.place(key) == "host"}


def fill(life: Life) -> None:
    """A group that keeps two blocks, each rank its own bytes."""
    store = life.begin()
    move = store.store([(key, number) for number, key in enumerate(KEYS)], [1.0, 1.0])
    assert move is not None
    for slot in move.slots:
        for rank, slab in enumerate(life.slabs):
            slab.slot(slot)[:] = bytes([10 * rank + slot]) * BLOCK
    store.complete(move, set())
    assert kept(store) == {*KEYS}
    life.end()


def test_each_slab_is_on_its_ranks_node_and_the_next_group_finds_them(nodes: Nodes) -> None:
    fill(Life(nodes))
    sizes = {host: size for host, (size, _) in nodes.regions().items()}
    assert sizes["far"] == SLOTS * BLOCK + 16 and 2 * SLOTS * BLOCK < sizes["near"] < 3 * SLOTS * BLOCK
    for _ in range(2):
        life = Life(nodes)
        store = life.begin()
        assert kept(store) == {*KEYS} and "2 KV blocks of an earlier group are there" in life.notes[-1]
        move = store.load(KEYS, [0, 1])
        for slot in move.slots:
            assert [bytes(slab.slot(slot)) for slab in life.slabs] == [bytes([10 * n + slot]) * BLOCK for n in range(3)]
        store.complete(move, set())
        life.end()
    assert {host: size for host, (size, _) in nodes.regions().items()} == sizes, "the same memory each time"


@pytest.mark.parametrize("host", ["near", "far"])
def test_memory_that_one_node_has_lost_is_worth_nothing_on_the_other(nodes: Nodes, host: str) -> None:
    fill(Life(nodes))
    nodes.tiers[host].stop()
    nodes.tiers[host].start()
    for _ in range(2):
        life = Life(nodes)
        assert not kept(life.begin())
        life.end()


def test_a_group_that_dies_while_it_starts_leaves_nothing_that_could_be_wrong(nodes: Nodes) -> None:
    """Between the stamp of the far slab and that of the index."""
    fill(Life(nodes))
    dying = Life(nodes)
    dying.open_ranks()
    assert dying.has_earlier == [True, True, True]
    dying.end()
    life = Life(nodes)
    assert not kept(life.begin()) and life.has_earlier == [True, True, False]
    life.end()


def test_a_slab_of_another_group_is_not_taken_for_its_own(nodes: Nodes) -> None:
    """Two groups on the same nodes, which are replaced in another order."""
    one, two = Life(nodes), Life(nodes)
    one.open_ranks()
    fill(two)
    one.opened.build(all(one.has_earlier))
    one.end()
    life = Life(nodes)  # takes what was freed last: of `one`
    assert not kept(life.begin())
    life.end()


def test_a_disk_that_a_ranks_node_does_not_have_is_named(tmp_path: Path) -> None:
    """Also where it has one of its own of that name, as another group's coordinator was there."""
    folder = tmp_path / "0" / "rank1"
    tiers = RankTiers(num_slots=SLOTS, layout=bytes(16), disk_folder=str(folder), disk_word=b"of the coordinator")
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"--kv-disk-path: .*rank1 of the coordinator is not on the node"):
            open_kv_lanes(Lanes(1, lambda _: None), 1, [], np.zeros(1, np.int32), tiers, CpuPlatform())
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / "LOCK").write_text("of another one")
