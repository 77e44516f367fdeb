"""Which tenants there are and how many of their requests run, as gateways told Redis. For `tandem status`."""

from collections.abc import Mapping

from cluster.coordination import keys
from cluster.coordination.client import Commands
from cluster.tenants.store import TenantStore


async def running_requests(redis: Commands) -> dict[str, int | None]:
    """Requests that run, by tenant; as late as a beat of the gateways. None: its limits need no counting, so nobody
    counts. RedisAway."""
    tenants = (await TenantStore(redis).read()).tenants
    seconds, micros = _pair(await redis.command("TIME"))
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    running: dict[str, int | None] = dict.fromkeys(sorted(tenants))
    for name in running:
        if not tenants[name].limits.are_counted:
            continue
        alive = await redis.command("ZRANGEBYSCORE", keys.quota_gateways(name), now_ms, "+inf")
        counts = await redis.command("HGETALL", keys.quota(name))
        assert isinstance(alive, list) and isinstance(counts, dict), (alive, counts)
        running[name] = _sum(counts, alive)
    return running


def _sum(counts: Mapping[bytes, bytes], gateways: list[bytes]) -> int:
    return sum(int(float(counts.get(b"n:" + gateway, b"0"))) for gateway in gateways)


def _pair(answer: object) -> tuple[int, int]:
    assert isinstance(answer, list | tuple), answer
    return answer[0], answer[1]
