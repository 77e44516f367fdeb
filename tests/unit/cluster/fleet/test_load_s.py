"""How long a group took to load, kept in Redis for gateways that start while there is none."""

from tandem.cluster.fleet.fleet_view import read_load_s, write_load_s
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient


async def test_the_time_of_the_last_load_outlives_its_group(server: RedisServer, redis: BackgroundClient) -> None:
    assert await read_load_s(redis, "s") == 0.0
    await write_load_s(redis, "s", 41.25)
    await redis.command("EXPIRE", keys.load_s("s"), 60)
    assert await read_load_s(redis, "s") == 41.25 and await read_load_s(redis, "other") == 0.0
    assert await redis.command("TTL", keys.load_s("s")) == keys.LOAD_TTL_S, "who reads it keeps it"
    server.stop()
    assert await read_load_s(redis, "s") == 0.0
