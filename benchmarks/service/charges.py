"""Traffic of the exchange of fairness charges between groups, over a real Redis server.

    python -m benchmarks.service.charges [--groups 256] [--tenants 1000] [--charged 1000] [--measured 16]

Every group exchanges once a second, with more than 100 groups less often. All groups of a service exchange twice, then
some of them once more, and the bytes to and from Redis are counted then, as are its CPU seconds: between two turns of a
group all others have had theirs. Each has charged `charged` of the tenants since its last exchange. Prints bytes and
CPU seconds per second of the whole service; JSON goes to out/benchmarks.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.record import RESULTS, write_record
from tandem.cluster.fleet.charges import MOST_PER_S, ChargeExchange
from tandem.cluster.process.redis_server import RedisServer
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import BackgroundClient
from tandem.configs.environment import short_temp_folder


class Group:
    """An exchange whose engine charges the same tenants each time."""

    def __init__(self, redis: BackgroundClient, name: str, charged: Mapping[str, float]) -> None:
        self._charged = charged
        self._now_s = 0.0
        self._exchange = ChargeExchange(redis, "bench", name, self._take, lambda charges: None, lambda: self._now_s)

    async def take_turn(self) -> None:
        """One exchange, some time after the last."""
        self._now_s += 3600.0
        await self._exchange.update()

    async def _take(self) -> Mapping[str, float]:
        return self._charged


async def counts(redis: BackgroundClient) -> tuple[int, float]:
    """Bytes in and out, and CPU seconds of the server."""
    stats, cpu = await redis.command("INFO", "stats"), await redis.command("INFO", "cpu")
    moved = int(stats["total_net_input_bytes"]) + int(stats["total_net_output_bytes"])
    return moved, float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


async def measure(url: str, options: argparse.Namespace) -> dict[str, float]:
    redis = BackgroundClient(url, timeout_s=60.0)
    names = [f"g{number:04}xyz" for number in range(options.groups)]
    await redis.command("SADD", keys.groups("bench"), *names)
    tenants = [f"tenant-{number:05}" for number in range(options.tenants)]
    groups = []
    for number, name in enumerate(names):
        chosen = (tenants[(number + i) % len(tenants)] for i in range(options.charged))
        groups.append(Group(redis, name, dict.fromkeys(chosen, 1234.0)))
    for group in groups:
        await group.take_turn()
    for group in groups:  # the first turns only learn
        await group.take_turn()
    measured = groups[: options.measured]
    before_bytes, before_s = await counts(redis)
    for group in measured:
        await group.take_turn()
    after_bytes, after_s = await counts(redis)
    await redis.close()
    share = min(options.groups, MOST_PER_S) / len(measured)
    return {
        "bytes_per_exchange": (after_bytes - before_bytes) / len(measured),
        "bytes_per_s": (after_bytes - before_bytes) * share,
        "redis_cpu_s_per_s": (after_s - before_s) * share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--charged", type=int, default=1000, help="tenants that each group charges in a second")
    parser.add_argument("--measured", type=int, default=16, help="groups whose exchanges are counted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tr-", dir=short_temp_folder()) as folder:  # a socket's path is short
        server = RedisServer(Path(folder) / "redis")
        server.start()
        try:
            figures = asyncio.run(measure(server.url, options))
        finally:
            server.stop()
    print(
        f"{options.groups} groups, {options.charged} of {options.tenants} tenants charged by each in a second: "
        f"{figures['bytes_per_exchange'] / 1e3:.1f} kB an exchange, {figures['bytes_per_s'] / 1e6:.2f} MB/s, "
        f"Redis CPU {figures['redis_cpu_s_per_s']:.2f} s/s"
    )
    write_record(RESULTS / "charges.json", options, **figures)


if __name__ == "__main__":
    main()
