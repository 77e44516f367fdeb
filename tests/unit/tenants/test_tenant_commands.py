"""`tandem tenants` and `tandem usage` over a real Redis: what they print, and the words for what is wrong."""

import asyncio
import time
from pathlib import Path

import msgspec
import pytest

from tandem.cluster.cli.client.running_service import ServiceAt, model_on, service_at
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.process.run_files import RunFile
from tandem.cluster.state import keys
from tandem.cluster.tenants.billing_record import BillingRecord
from tandem.cluster.tenants.ledger import UsageLedger
from tandem.cluster.tenants.usage_cap import UsageCap
from tandem.configs.errors import SettingsError, TandemError
from tandem.workers.messages.request import Usage
from tests.support.verbs import invoked
from tests.unit.tenants.tenant_rig import patient


def tandem(server: RedisServer, *arguments: str) -> str:
    """What goes to standard output."""
    command = (*arguments, "--redis-url", server.url)
    done = invoked(command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def removed(server: RedisServer, name: str) -> str:
    """What `tandem tenants rm` says on standard error."""
    command = ("tenants", "rm", name, "--redis-url", server.url)
    return invoked(command, catch_exceptions=False).stderr


def test_a_tenant_from_its_first_key_to_its_end(server: RedisServer) -> None:
    key = tandem(server, "tenants", "add", "acme", "--concurrency", "3", "--priority", "-5", "--kv-share", "0.5")
    assert key.startswith("sk-tandem-") and len(key.split()) == 1, "the key alone, for scripts"
    assert tandem(server, "tenants", "set", "acme", "--concurrency", "none", "--weight", "2").split() == [
        *("acme", "kv-share", "0.5", "weight", "2", "priority", "-5")
    ]
    large = ("--token-budget", "25000000", "--tokens-per-minute", "1234567", "--kv-share", "0.125", "--weight", "1e3")
    assert tandem(server, "tenants", "set", "acme", *large).split() == [
        *("acme", "tokens-per-minute", "1234567", "kv-share", "0.125", "weight", "1000", "priority", "-5"),
        *("token-budget", "25000000"),
    ]
    assert tandem(server, "tenants", "rotate-key", "acme", "--grace", "60") != key
    assert tandem(server, "tenants", "ls").startswith("acme ")
    tandem(server, "tenants", "add", "beta")
    rest, last = (removed(server, name) for name in ("acme", "beta"))
    assert "stays closed" not in rest and "stays closed" in last
    assert tandem(server, "tenants", "ls") == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tenants", "add", "acme", "--concurrency", "three"), "neither a number nor"),
        (("tenants", "add", "acme", "--kv-share", "2"), "kv_share: Expected"),
        (("tenants", "add", "A"), "a-z, 0-9"),
        (("tenants", "set", "acme"), "give a limit"),
        (("tenants", "set", "acme", "--concurrency", "1"), "no tenant 'acme'"),
        (("tenants", "rm", "acme"), "no tenant 'acme'"),
        (("usage", "--since", "never"), "neither a time"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(server: RedisServer, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(TandemError, match=words) as caught:
        tandem(server, *arguments)
    assert "\n" not in str(caught.value)


def test_a_redis_that_is_not_there_is_said(server: RedisServer) -> None:
    server.stop()
    with pytest.raises(TandemError, match="Redis is away: "):
        tandem(server, "tenants", "ls")


def test_usage_in_its_three_forms(server: RedisServer, tmp_path: Path) -> None:
    async def serve_two() -> None:
        redis = patient(server)
        books = UsageLedger(redis, tmp_path, "g", 86400)
        for number, adapter in enumerate((None, "a@12")):
            record = BillingRecord(id=f"r{number}", time_s=time.time(), tenant="acme", model="m", adapter=adapter)
            usage = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3)
            books.accepted(record)
            await books.settle(record.ended("stop", usage, time.time()))
        await books.close()
        await redis.close()

    asyncio.run(serve_two())
    table = [line.split() for line in tandem(server, "usage").splitlines()]
    assert table == [
        ["tenant", "model", "adapter", "requests", "prompt", "cached", "completion"],
        ["acme", "m", "-", "1", "5", "3", "7"],
        ["acme", "m", "a@12", "1", "5", "3", "7"],
    ]
    lines = tandem(server, "usage", "--tenant", "acme", "--format", "csv").splitlines()
    assert lines[0] == "id,time_s,tenant,model,adapter,terminal,prompt_tokens,cached_tokens,completion_tokens"
    assert [line.split(",")[4:] for line in lines[1:]] == [["", "stop", "5", "3", "7"], ["a@12", "stop", "5", "3", "7"]]
    assert '"adapter":"a@12"' in tandem(server, "usage", "--format", "json", "--since", "1h").splitlines()[1]
    assert tandem(server, "usage", "--tenant", "other", "--format", "json") == ""


def test_usage_includes_what_is_kept_as_sums_and_says_so(server: RedisServer, tmp_path: Path) -> None:
    async def serve_two() -> None:
        redis = patient(server)
        books, now_s = UsageLedger(redis, tmp_path, "g", 86400), time.time()
        for number, time_s in enumerate((now_s - 5 * 3600, now_s)):
            record = BillingRecord(id=f"r{number}", time_s=time_s, tenant="acme", model="m")
            await books.settle(record.ended("stop", Usage(prompt_tokens=5, completion_tokens=7), time_s))
        await books.send()
        await UsageCap(redis, "g", 1, 86400).enforce()
        await books.close()
        await redis.close()

    asyncio.run(serve_two())
    done = invoked(("usage", "--redis-url", server.url), catch_exceptions=False)
    assert done.stdout.splitlines()[1].split() == ["acme", "m", "-", "2", "10", "0", "14"]
    assert "1 earlier requests are kept as sums by hour" in done.stderr
    lines = tandem(server, "usage", "--format", "csv").splitlines()[1:]
    assert [line.partition(",")[0] for line in lines] == ["r1"]


def test_nothing_to_show_is_said(server: RedisServer) -> None:
    for arguments, words in (
        (("tenants", "ls"), "there are no tenants"),
        (("usage", "--tenant", "ghost"), "nothing was used by ghost"),
    ):
        command = (*arguments, "--redis-url", server.url)
        done = invoked(command, catch_exceptions=False)
        assert done.exit_code == 0 and words in done.stderr and words not in done.stdout


@pytest.mark.parametrize("verb", [("adapters", "ls"), ("tenants", "ls"), ("usage",)], ids=" ".join)
def test_without_a_service_all_say_the_same(verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.process.run_files.read_run_files", list)
    with pytest.raises(TandemError, match="start one with `tandem serve`, or give --redis-url"):
        invoked(verb, catch_exceptions=False)


@pytest.mark.parametrize("verb", [("adapters", "ls"), ("tenants", "ls"), ("usage",), ("status",)], ids=" ".join)
def test_all_take_the_address_of_a_service_that_runs_here(
    server: RedisServer, verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the newest, whose Redis is not there."""

    async def initialize() -> None:
        redis = patient(server)
        await redis.command("SET", keys.SENTINEL, "1")
        await redis.close()

    asyncio.run(initialize())
    runs = [run_file(9001, "unix:///nowhere"), run_file(9000, server.url)]
    monkeypatch.setattr("tandem.cluster.process.run_files.read_run_files", lambda: runs)
    command = (*verb, "--url", "http://localhost:9000/v1")
    done = invoked(command, catch_exceptions=False)
    assert done.exit_code == 0 and "9001" not in done.output
    with pytest.raises(SettingsError, match=r"is no service of yours that runs here; there is http://127.0.0.1:9001,"):
        invoked((*verb, "--url", "http://far:9000"), catch_exceptions=False)


def test_a_service_is_the_newest_or_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run_file(9001, "unix:///new"), run_file(9000, "unix:///old")]
    monkeypatch.setattr("tandem.cluster.process.run_files.read_run_files", lambda: runs)
    assert service_at(None, None) == ServiceAt("unix:///new", "demo-9001")
    assert "2 services run here; using the newest, http://127.0.0.1:9001" in capsys.readouterr().err
    assert service_at("http://[::1]:9000", None) == ServiceAt("unix:///old", "demo-9000")
    runs.append(msgspec.structs.replace(run_file(9002, "unix:///wide"), url="http://0.0.0.0:9002"))
    assert service_at("http://127.0.0.2:9002", None).redis_url == "unix:///wide"
    with pytest.raises(SettingsError, match="is no service of yours"):
        service_at("http://192.0.2.77:9002", None)
    assert service_at(None, "unix:///old") == ServiceAt("unix:///old", None)
    assert model_on("unix:///old") == "demo-9000"
    with pytest.raises(SettingsError, match="name the base model"):
        model_on("redis://elsewhere")
    for url, redis_url in (("http://127.0.0.1:9000", "unix:///old"), ("http://h:x", None), ("localhost:9000", None)):
        with pytest.raises(SettingsError) as caught:
            service_at(url, redis_url)
        assert caught.value.flag == "--url"
    assert capsys.readouterr().err == ""


def run_file(port: int, redis_url: str) -> RunFile:
    url = f"http://127.0.0.1:{port}"
    return RunFile(pid=1, started_at=0.0, url=url, model=f"demo-{port}", service_id="s", redis_url=redis_url)
