"""Redis as others run it, with real servers: TLS with an authority of one's own, sentinels, cluster mode."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from tandem.cluster.deploy.preflight import note_on_redis
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.lease import RedisLease
from tandem.cluster.state.redis_client import (
    CLUSTER_MODE,
    BackgroundClient,
    RedisRefused,
    RedisUnavailable,
    RequestClient,
    check_reachable,
    published,
)
from tandem.configs.errors import SettingsError
from tandem.configs.secrets import parse_sentinel_url
from tests.support.certificates import Authority
from tests.support.redis_kinds import free_ports, redis_process
from tests.support.tls_front import tls_in_front

SET = "return redis.call('SET', KEYS[1], ARGV[1])"


def test_the_parts_of_a_url_with_sentinels() -> None:
    url = parse_sentinel_url("rediss+sentinel://me:p%40ss@a:1,[::1],b/the%20one/3?ssl_ca_certs=/ca.pem")
    assert url is not None and url.master == "the one"
    assert url.sentinels == (("a", 1), ("::1", 26379), ("b", 26379))
    assert url.server_url == "rediss://me:p%40ss@server/3?ssl_ca_certs=/ca.pem"
    assert parse_sentinel_url("redis://a:1/0") is None


async def test_tls_with_an_authority_of_ones_own(tmp_path: Path, server: RedisServer) -> None:
    """TLS is in front of the server, as not every build of one speaks it."""
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    issued = authority.issue("redis", address="127.0.0.1")
    async with tls_in_front(server.socket_path, issued.certfile, issued.keyfile) as port:
        url = f"rediss://127.0.0.1:{port}/0"
        redis = BackgroundClient(f"{url}?ssl_ca_certs={quote(authority.certfile)}")
        assert await redis.command("SET", "k", "v")
        await redis.close()

        async def why(query: str) -> str:
            return str(await asyncio.to_thread(check_reachable, url + query))

        assert await why(f"?ssl_ca_certs={quote(authority.certfile)}") == "None"
        assert "certificate verify failed" in await why("")
        assert "certificate verify failed" in await why(f"?ssl_ca_certs={quote(other.certfile)}")
        assert await why("?ssl_ca_certs=/nowhere.pem") == "ssl_ca_certs=/nowhere.pem: there is no such file"
        assert "ssl_ca_file" in await why("?ssl_ca_file=/nowhere.pem"), "an option there is none of"


@pytest.mark.chaos
async def test_a_master_is_found_by_sentinels_and_followed(tmp_path: Path) -> None:
    """The service's clients go on with the server that takes the master's place, writes and announcements too."""
    first, second, sentinel = free_ports(3)
    watched = ["sentinel down-after-milliseconds m 30000", "sentinel failover-timeout m 10000"]
    with (
        redis_process(tmp_path / "1", f"port {first}"),
        redis_process(tmp_path / "2", f"port {second}", f"replicaof 127.0.0.1 {first}", "repl-diskless-sync-delay 0"),
        redis_process(
            tmp_path / "s", f"port {sentinel}", f"sentinel monitor m 127.0.0.1 {first} 1", *watched, is_sentinel=True
        ),
    ):
        url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel}/m/2"
        assert await asyncio.to_thread(check_reachable, url) is None
        assert "no sentinel names a master" in str(await asyncio.to_thread(check_reachable, url.replace("/m/", "/x/")))
        redis, asked = BackgroundClient(url), RequestClient(lambda: url, timeout_s=5.0)
        server = BackgroundClient(f"redis://127.0.0.1:{second}/2")
        other = BackgroundClient(f"redis://127.0.0.1:{sentinel}")
        try:
            await redis.command("SET", "k", "before")
            await asked.script(SET, ("j",), ("before",))
            async with asyncio.timeout(60):
                while await server.command("GET", "k") != b"before":
                    await asyncio.sleep(0.05)
                await until_done(lambda: other.command("SENTINEL", "FAILOVER", "m"))  # once it knows of the replica
                await until_done(lambda: server.command("SET", "k", "it is the master"))
                while await server.command("GET", "k") != b"after":
                    await until_done(lambda: redis.command("SET", "k", "after"))
                while await server.command("GET", "j") != b"after":
                    await until_done(lambda: asked.script(SET, ("j",), ("after",)))
                told = published(url, ["k"], silent_s=10.0)
                assert await anext(told) is None
                await server.command("PUBLISH", "k", "")
                assert await anext(told) == "k"
                await told.aclose()
        finally:
            for client in (redis, asked, server, other):
                await client.close()


async def until_done(call: Callable[[], Awaitable[object]]) -> None:
    """Calls until it is no longer refused, nor Redis away."""
    while True:
        try:
            await call()
            return
        except RedisUnavailable:
            await asyncio.sleep(0.05)


async def test_cluster_mode_is_refused_by_name(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with redis_process(tmp_path / "c", f"port {port}", "cluster-enabled yes"):
        url = f"redis://127.0.0.1:{port}"
        assert check_reachable(url) == CLUSTER_MODE
        with pytest.raises(SettingsError, match="cluster mode") as refused:
            note_on_redis(url)
        assert refused.value.flag == "redis_url"
        assert "does not answer" in str(note_on_redis("redis://:word@127.0.0.1:1")), "it may later"
        redis = BackgroundClient(url, retries=0)
        with pytest.raises(RedisRefused, match="cluster mode"):
            await RedisLease(redis, keys.USAGE_LEASE, "me", 1000).take()
        await redis.close()
