"""Loads for route_replay.py: a recorded trace of conversations, and others that a seeded generator makes of its
arrivals."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

from benchmarks.service.toy_fleet import BLOCK, Asked
from benchmarks.service.trace_replay.trace import Row

FLOOD = "flood"
TENANTS = 8
ADAPTERS = 256
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 4, 8


def conversations(rows: Sequence[Row], rng: random.Random) -> list[Asked]:
    """The trace as it is. Its rows name no conversation: those that share their second block are taken for one."""
    return [
        Asked(
            row.time_s,
            row.input_length,
            max(1, row.output_length),
            row.block_ids,
            session=str(row.block_ids[1]) if len(row.block_ids) > 1 else "",
        )
        for row in rows
    ]


def shared_system_prompt(rows: Sequence[Row], rng: random.Random) -> list[Asked]:
    """Each prompt begins with one of a few long texts; what follows is its own."""
    fresh = itertools.count(SYSTEM_PROMPTS * SYSTEM_BLOCKS)
    asked = []
    for row in rows:
        which = rng.randrange(SYSTEM_PROMPTS)
        own = 1 + int(rng.expovariate(1 / 1500))
        blocks = [which * SYSTEM_BLOCKS + i for i in range(SYSTEM_BLOCKS)] + [next(fresh) for _ in range(own // BLOCK)]
        asked.append(Asked(row.time_s, SYSTEM_BLOCKS * BLOCK + own, max(1, row.output_length), blocks))
    return asked


def zipf_adapters(rows: Sequence[Row], rng: random.Random) -> list[Asked]:
    """Prompts of their own for adapters by Zipf's law."""
    names = [f"{i:016x}" for i in range(ADAPTERS)]
    weights = [1 / (i + 1) for i in range(ADAPTERS)]
    return [
        _own(row, rng, adapter=name) for row, name in zip(rows, rng.choices(names, weights, k=len(rows)), strict=True)
    ]


def uniform(rows: Sequence[Row], rng: random.Random) -> list[Asked]:
    """Prompts that share nothing."""
    return [_own(row, rng) for row in rows]


def flooding_tenant(rows: Sequence[Row], rng: random.Random) -> list[Asked]:
    """The trace's conversations, of eight tenants; one more sends three times as much as all of them, nothing twice."""
    found = []
    for asked in conversations(rows, rng):
        tenant = f"t{hash_of(asked.session or str(asked.time_s)) % TENANTS}"
        found.append(Asked(asked.time_s, asked.prompt, asked.output, asked.blocks, tenant, session=asked.session))
    mean_s = rows[-1].time_s / len(rows)
    for row in rows:
        found += [_own(row, rng, tenant=FLOOD, after_s=rng.expovariate(1 / mean_s)) for _ in range(3)]
    return sorted(found, key=lambda asked: asked.time_s)


def hash_of(name: str) -> int:
    """A number that is the same in every run."""
    return int.from_bytes(random.Random(name).randbytes(4), "little")


LOADS: Mapping[str, Callable[[Sequence[Row], random.Random], list[Asked]]] = {
    "conversations": conversations,
    "shared prompt": shared_system_prompt,
    "adapters": zipf_adapters,
    "uniform": uniform,
    "flood": flooding_tenant,
}


def _own(row: Row, rng: random.Random, *, adapter: str | None = None, tenant: str = "t", after_s: float = 0.0) -> Asked:
    prompt = 1 + int(rng.lognormvariate(7.6, 0.8))
    output = max(1, row.output_length)
    return Asked(row.time_s + after_s, prompt, output, [], tenant, adapter)
