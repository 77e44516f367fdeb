"""The host tier of a node that is no launcher's: kept for groups that come and go, started again, ended when unused."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.cluster.group import host_tier_actor
from tandem.cluster.group.host_tier_actor import HostTierKeeper
from tandem.configs.environment import short_temp_folder
from tandem.offload.host.host_process import RegionLease, lease


class Keeper(HostTierKeeper):
    """An actor without Ray, with its process in a folder of the test's."""

    def __init__(self, folder: Path, budget_bytes: int = 2**20) -> None:
        self.now_s = 100.0
        self.folder = folder
        super().__init__("s-1", budget_bytes, lease_s=60.0, clock=lambda: self.now_s)

    def _place(self) -> Path:
        return self.folder

    async def _keep(self) -> None:
        """The test looks itself."""


@pytest.fixture
async def keeper() -> AsyncIterator[Keeper]:
    with tempfile.TemporaryDirectory(prefix="th-", dir=short_temp_folder()) as name:
        keeper = Keeper(Path(name))
        yield keeper
        await keeper.end()
        assert list(Path(name).iterdir()) == [], "nothing of it is left"


async def leased(keeper: Keeper) -> RegionLease:
    """A region, as a group leases it."""
    return await asyncio.to_thread(lease, Path(await keeper.socket()), "layout", 4096, [8192], 10.0)


async def test_what_a_killed_group_left_is_found_by_the_next_one(keeper: Keeper) -> None:
    held = await leased(keeper)
    held.index[:4] = b"keys"
    keeper.now_s += 60.0
    assert not await keeper.look(), "a group uses it"
    held.close()  # as the end of its process does
    again = await leased(keeper)
    assert again.reused and again.index[:4] == b"keys"
    again.close()
    keeper.now_s += 59.0
    assert not await keeper.look()
    keeper.now_s += 1.0
    assert await keeper.look(), "nobody has used it for as long as its lease"


async def test_a_process_that_died_is_started_again_empty(keeper: Keeper) -> None:
    (await leased(keeper)).close()
    assert keeper._process is not None and keeper._process._process is not None
    keeper._process._process.kill()
    keeper._process._process.wait(10)
    assert not await keeper.look() and keeper._process.is_alive()
    again = await leased(keeper)
    assert not again.reused
    again.close()


async def test_a_node_gives_no_more_than_a_share_of_what_it_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, wanted in ((10_000, 900), (1000, 600)):
        monkeypatch.setattr(host_tier_actor, "available_bytes", lambda free=free: free)
        assert Keeper(Path(), 900)._budget_bytes == wanted
