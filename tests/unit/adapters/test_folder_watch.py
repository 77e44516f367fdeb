"""A watched folder: what settles is listed, what changes is switched, what goes is unlisted. Time is the test's."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.adapter_service import AdapterService
from tandem.cluster.adapters.folder_watch import SETTLED_S, UNSEEN_S, FolderWatch, Sightings
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient, RedisUnavailable
from tandem.configs.errors import TandemError
from tests.support.private_redis import private_redis


def content(source: str) -> str:
    """The digest stands in the weight file."""
    text = (Path(source) / "adapter_model.safetensors").read_text()
    if not text.startswith("weights "):
        raise TandemError("it holds no weights")
    return text.removeprefix("weights ") * 64


def write(folder: Path, digest: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(f"weights {digest}")


class Rig:
    """A watch over a folder, and time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.checks = 0
        self.adapter_service = AdapterService(AdapterList(None, "demo"), self._check, ("demo",))
        self.watch = FolderWatch(folder, self.adapter_service, Others(), lambda: self.now_s)

    def _check(self, source: str) -> str:
        self.checks += 1
        return content(source)

    async def look(self, after_s: float = SETTLED_S) -> dict[str, str]:
        """What is listed after one more look."""
        self.now_s += after_s
        await self.watch.look()
        return {name: entry.digest[0] for name, entry in self.adapter_service.adapters.entries.items()}


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.adapter_service.close()


async def test_folders_come_change_and_go(rig: Rig) -> None:
    assert await rig.look() == {}
    write(rig.folder / "one", "a")
    assert await rig.look() == {}, "it may be being written"
    assert await rig.look() == {"one": "a"}
    write(rig.folder / "two", "b")
    await rig.look()
    assert await rig.look() == {"one": "a", "two": "b"}
    write(rig.folder / "one", "cc")
    assert await rig.look() == {"one": "a", "two": "b"}
    assert await rig.look() == {"one": "c", "two": "b"}
    (rig.folder / "two" / "adapter_config.json").unlink()
    assert await rig.look() == {"one": "c", "two": "b"}, "it may be being moved"
    assert await rig.look() == {"one": "c"}
    assert rig.checks == 3, "each version is read once"


async def test_a_folder_that_grows_is_taken_when_it_has_settled(rig: Rig) -> None:
    write(rig.folder / "one", "a")
    for length in range(2, 6):
        write(rig.folder / "one", "a" * length)
        assert await rig.look() == {}
    assert await rig.look(SETTLED_S / 2) == {}
    assert await rig.look(SETTLED_S / 4) == {}
    assert await rig.look(SETTLED_S / 4) == {"one": "a"}


async def test_what_cannot_be_served_is_tried_again_only_when_it_changes(rig: Rig) -> None:
    write(rig.folder / "one", "a")
    (rig.folder / "one" / "adapter_model.safetensors").write_text("nonsense")
    for _ in range(4):
        assert await rig.look() == {}
    assert rig.checks == 1
    write(rig.folder / "one", "a")
    await rig.look()
    assert await rig.look() == {"one": "a"}


async def test_what_was_unloaded_by_hand_stays_so_until_it_changes(rig: Rig) -> None:
    write(rig.folder / "one", "a")
    await rig.look()
    await rig.look()
    await rig.adapter_service.unload("one")
    assert await rig.look() == {}
    write(rig.folder / "one", "bb")
    await rig.look()
    assert await rig.look() == {"one": "b"}


async def test_only_its_own_are_touched(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / "one"
    write(other, "z")
    await rig.adapter_service.load("one", str(other))
    write(rig.folder / "one", "a")
    await rig.look()
    assert await rig.look() == {"one": "z"}, "the name is taken by another source"
    (rig.folder / "one" / "adapter_config.json").unlink()
    await rig.look()
    assert await rig.look() == {"one": "z"}


async def test_a_folder_that_is_missing_for_a_moment_stays_listed(rig: Rig) -> None:
    write(rig.folder / "one", "a")
    await rig.look()
    await rig.look()
    for _ in range(2):  # each absence counts for itself
        unavailable = (rig.folder / "one").rename(rig.folder / ".away")
        assert await rig.look() == {"one": "a"}
        assert await rig.look(SETTLED_S / 2) == {"one": "a"}
        unavailable.rename(rig.folder / "one")
        assert await rig.look() == {"one": "a"}
    assert rig.adapter_service.counts["unlisted"] == 0


async def test_what_comes_back_is_whose_it_was(rig: Rig) -> None:
    write(rig.folder / "one", "a")
    await rig.adapter_service.load("one", str(rig.folder / "one"), tenant="acme", pinned=True)
    await rig.look()
    unavailable = (rig.folder / "one").rename(rig.folder / ".away")
    await rig.look()
    assert await rig.look() == {}
    unavailable.rename(rig.folder / "one")
    await rig.look()
    assert await rig.look() == {"one": "a"}
    entry = rig.adapter_service.adapters.entries["one"]
    assert (entry.tenant, entry.pinned) == ("acme", True)


async def test_names_that_no_adapter_can_have_and_files_are_left_alone(rig: Rig) -> None:
    write(rig.folder / ".hidden", "a")
    write(rig.folder / "a b", "a")
    (rig.folder / "file").write_text("")
    (rig.folder / "empty").mkdir()
    await rig.look()
    assert await rig.look() == {}


async def test_a_link_that_is_moved_to_another_version_switches(
    rig: Rig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    versions = tmp_path_factory.mktemp("versions")
    for digest in "ab":
        write(versions / digest, digest * (1 + ord(digest) - ord("a")))
    link = rig.folder / "one"
    link.symlink_to(versions / "a")
    await rig.look()
    assert await rig.look() == {"one": "a"}
    link.unlink()
    link.symlink_to(versions / "b")
    await rig.look()
    assert await rig.look() == {"one": "b"}


async def test_a_folder_that_cannot_be_read_unlists_nothing(rig: Rig) -> None:
    write(rig.folder / "one", "a")
    await rig.look()
    await rig.look()
    moved = rig.folder.rename(rig.folder.with_name("moved"))
    assert await rig.look() == {"one": "a"}
    moved.rename(rig.folder)
    assert await rig.look() == {"one": "a"}


async def test_while_redis_is_unavailable_it_tries_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    write(rig.folder / "one", "a")
    replace = rig.adapter_service.adapters.replace

    async def unavailable(*_: object) -> bool:
        raise RedisUnavailable("gone")

    monkeypatch.setattr(rig.adapter_service.adapters, "replace", unavailable)
    for _ in range(3):
        assert await rig.look() == {}
    monkeypatch.setattr(rig.adapter_service.adapters, "replace", replace)
    assert await rig.look() == {"one": "a"}


class Others:
    """What other gateways see; None: Redis is unavailable."""

    def __init__(self) -> None:
        self.names: set[str] | None = set()
        self.told: list[str] = []

    async def exchange(self, names: list[str]) -> set[str]:
        if self.names is None:
            raise RedisUnavailable("it is away")
        self.told = names
        return self.names


async def test_what_another_gateway_sees_is_not_unlisted(rig: Rig) -> None:
    """Two nodes, of which one lost its copy of the folder, or never had it."""
    others = Others()
    rig.watch = FolderWatch(rig.folder, rig.adapter_service, others, lambda: rig.now_s)
    write(rig.folder / "one", "a")
    await rig.look()
    assert await rig.look() == {"one": "a"} and others.told == ["one"]
    others.names = {"one"}
    (rig.folder / "one" / "adapter_config.json").unlink()
    for _ in range(5):
        assert await rig.look() == {"one": "a"} and others.told == []
    others.names = None
    for _ in range(5):
        assert await rig.look() == {"one": "a"}, "what they see is not known"
    others.names = set()
    assert await rig.look() == {"one": "a"}
    assert await rig.look() == {}


async def test_a_gateway_that_never_saw_a_folder_waits_for_one_that_may_have_it(rig: Rig) -> None:
    write(rig.folder / "one", "a")
    await rig.look()
    assert await rig.look() == {"one": "a"}
    (rig.folder / "one" / "adapter_config.json").unlink()
    others = Others()
    rig.watch = FolderWatch(rig.folder, rig.adapter_service, others, lambda: rig.now_s)
    for _ in range(3):
        assert await rig.look() == {"one": "a"}
    others.names = {"one"}  # it has started
    assert await rig.look(2 * UNSEEN_S) == {"one": "a"}
    others.names = set()
    assert await rig.look() == {"one": "a"}
    assert await rig.look(UNSEEN_S) == {}


async def test_gateways_tell_each_other_over_redis() -> None:
    with private_redis() as server:
        redis = BackgroundClient(server.url)
        one, two, third = (Sightings(redis, "service") for _ in range(3))
        assert await one.exchange(["a"]) == set()
        assert await two.exchange(["b", "c"]) == {"a"}
        assert await one.exchange([]) == {"b", "c"}
        assert await Sightings(redis, "other").exchange(["x"]) == set()
        assert await third.exchange([]) == {"b", "c"}
        await redis.command("DEL", keys.sighting("service", two._id))  # its time is over
        assert await one.exchange([]) == set()
        await redis.close()
