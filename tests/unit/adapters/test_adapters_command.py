"""`tandem adapters` against a real Redis and no service: everything but the reading of it by gateways."""

import asyncio
import shutil
from functools import partial
from pathlib import Path

import pytest
from typer.testing import Result

from tandem.cluster.adapters.adapter_list import AdapterList
from tandem.cluster.adapters.entries import AdapterEntry, BaseFacts
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.cluster.tenants.store import TenantStore
from tandem.configs.errors import SettingsError
from tests.support.verbs import invoked

DEMO = Path(__file__).resolve().parents[3] / "configs" / "demo"
PIRATE, SHOUT = (str(DEMO / "adapters" / name) for name in ("pirate", "shout"))


@pytest.fixture
def url(server: RedisServer) -> str:
    """Of a Redis from which `demo` was served, with one tenant that may have one adapter."""

    async def prepare() -> None:
        redis = BackgroundClient(server.url)
        await redis.command("FLUSHALL")
        await redis.command("SET", keys.SENTINEL, "1")
        adapters = AdapterList(redis, "demo")
        adapters.announce(BaseFacts(folder=str(DEMO / "model"), max_rank=16, names=("demo", "demo-2")))
        await adapters.refresh()
        await TenantStore(redis).add("acme", {"max_adapters": 1})
        await redis.close()

    asyncio.run(prepare())
    return server.url


def listed(url: str) -> dict[str, AdapterEntry]:
    async def read() -> dict[str, AdapterEntry]:
        redis = BackgroundClient(url)
        adapters = AdapterList(redis, "demo")
        await adapters.refresh()
        await redis.close()
        return dict(adapters.entries)

    return asyncio.run(read())


def tandem(url: str, *arguments: str) -> Result:
    return invoked(["adapters", *arguments, "--redis-url", url, "--model", "demo"])


def test_an_adapter_comes_is_pinned_and_goes(url: str) -> None:
    assert tandem(url, "add", "pirate", PIRATE, "--pin").output == "pirate listed\n"
    entry = listed(url)["pirate"]
    assert (entry.source, entry.pinned, entry.tenant) == (PIRATE, True, None)
    assert tandem(url, "ls").output == f"pirate@{entry.digest[:12]}  public  pinned  {PIRATE}\n"
    assert tandem(url, "unpin", "pirate").exit_code == 0
    assert not listed(url)["pirate"].pinned
    assert tandem(url, "pin", "pirate").exit_code == 0
    assert listed(url)["pirate"].pinned
    assert tandem(url, "add", "pirate", PIRATE).output == "pirate unchanged\n"
    assert listed(url)["pirate"].pinned, "what was not said stays"
    taken = tandem(url, "add", "pirate", SHOUT).exception
    assert isinstance(taken, SettingsError) and taken.flag == "--replace"
    assert "taken by other content" in str(taken) and "load_inplace" not in str(taken)
    assert tandem(url, "add", "pirate", SHOUT, "--replace").output == "pirate switched\n"
    assert tandem(url, "rm", "pirate").output == "pirate removed\n"
    assert listed(url) == {}


def test_the_same_content_from_elsewhere_is_said(url: str, tmp_path: Path) -> None:
    copy = str(shutil.copytree(PIRATE, tmp_path / "copy"))
    tandem(url, "add", "pirate", PIRATE)
    moved = f"source moved from {PIRATE} to {copy}"
    assert tandem(url, "add", "pirate", copy).output == f"pirate unchanged: {moved}\n"
    assert listed(url)["pirate"].source == copy
    assert tandem(url, "add", "pirate", copy, "--tenant", "acme").output == "pirate unchanged: now tenant acme's\n"
    both = tandem(url, "add", "pirate", copy, "--public", "--pin").output
    assert both == "pirate unchanged: now everyone's, pinned\n"
    assert tandem(url, "add", "pirate", copy).output == "pirate unchanged\n"


def test_relative_paths_are_of_the_folder_that_one_is_in(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEMO)
    assert tandem(url, "add", "pirate", "adapters/pirate").exit_code == 0
    assert listed(url)["pirate"].source == PIRATE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "odd", str(DEMO)), f"{DEMO}: it holds no adapter_config.json"),
        (("add", "odd", "/no/such/folder"), "/no/such/folder: it is not a folder"),
        (("add", "odd", "/"), "SOURCE: /: it holds no adapter_config.json"),
        (("add", "demo", PIRATE), "name of the model itself"),
        (("add", "demo-2", PIRATE), "name of the model itself"),
        (("add", "a b", PIRATE), "An adapter's name is"),
        (("add", "mine", PIRATE, "--tenant", "nobody"), "There is no tenant 'nobody'"),
        (("rm", "none"), "there is no adapter none"),
        (("pin", "none"), "there is no adapter none"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(url: str, arguments: tuple[str, ...], words: str) -> None:
    done = tandem(url, *arguments)
    assert done.exit_code != 0
    assert words in str(done.exception)
    assert listed(url) == {}


def test_a_tenant_has_no_more_than_it_may(url: str) -> None:
    assert tandem(url, "add", "one", PIRATE, "--tenant", "acme").exit_code == 0
    assert listed(url)["one"].tenant == "acme"
    done = tandem(url, "add", "two", SHOUT, "--tenant", "acme")
    assert "has 1 adapters and may have 1" in str(done.exception)
    assert tandem(url, "add", "two", SHOUT, "--tenant", "default").exit_code == 0


def test_a_tenants_adapter_is_made_everyones(url: str) -> None:
    assert tandem(url, "add", "one", PIRATE, "--tenant", "acme").exit_code == 0
    assert tandem(url, "add", "one", PIRATE).exit_code == 0
    assert listed(url)["one"].tenant == "acme", "what was not said stays"
    both = tandem(url, "add", "one", PIRATE, "--public", "--tenant", "acme").exception
    assert isinstance(both, SettingsError) and both.flag == "--public"
    assert tandem(url, "add", "one", PIRATE, "--public").exit_code == 0
    assert listed(url)["one"].tenant is None
    assert tandem(url, "add", "two", SHOUT, "--tenant", "acme").exit_code == 0, "it does not count any more"


def test_only_who_adds_needs_the_models_folder(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tandem(url, "add", "pirate", PIRATE).exit_code == 0
    monkeypatch.setattr(Path, "is_dir", lambda path: path != DEMO / "model")
    refused = tandem(url, "add", "shout", SHOUT)
    assert "the model's folder, is not on this machine" in str(refused.exception)
    for verb in ("pin", "unpin", "rm"):
        done = tandem(url, verb, "pirate")
        assert done.exit_code == 0, done.exception
    assert listed(url) == {}


def test_a_tenant_goes_after_its_adapters_beside_every_model(url: str) -> None:
    async def list_elsewhere(*, after: AdapterEntry | None) -> None:
        redis = BackgroundClient(url)
        adapters = AdapterList(redis, "other")
        adapters.announce(BaseFacts(folder="/m", max_rank=8))
        await adapters.refresh()
        assert await adapters.replace(adapters.entries.get("far"), after, "far")
        await redis.close()

    asyncio.run(list_elsewhere(after=AdapterEntry(name="far", digest="a" * 64, source="/a", tenant="acme")))
    tenants = partial(invoked, ["tenants", "rm", "acme", "--redis-url", url])
    assert tandem(url, "add", "one", PIRATE, "--tenant", "acme").exit_code == 0
    assert tandem(url, "add", "two", SHOUT).exit_code == 0
    assert "'acme' has adapters; remove them first: far, one." in str(tenants().exception)
    assert tandem(url, "rm", "one").exit_code == 0
    assert "remove them first: far." in str(tenants().exception)
    asyncio.run(list_elsewhere(after=None))
    assert tenants().output.startswith("acme removed\n")


def test_a_redis_that_served_no_adapters_is_said(server: RedisServer, url: str) -> None:
    done = invoked(["adapters", "add", "x", PIRATE, "--redis-url", url, "--model", "other"])
    assert "no service with --enable-lora has served other" in str(done.exception)
