"""Which adapters a tenant has of its own, beside every base model of a Redis. Asked before a tenant is removed."""

import msgspec

from cluster.adapters.entries import AdapterEntry
from cluster.coordination import keys
from cluster.coordination.registry import Commands

KEYS_AT_ONCE = 1000


async def adapters_of(redis: Commands, tenant: str) -> list[str]:
    """Their names, sorted. RedisAway."""
    names: set[str] = set()
    cursor: object = 0
    while True:
        answer = await redis.command("SCAN", _text(cursor), "MATCH", keys.adapters("*"), "COUNT", KEYS_AT_ONCE)
        assert isinstance(answer, list | tuple), answer
        cursor, lists = answer
        for key in lists:
            names |= await _names(redis, _text(key), tenant)
        if _text(cursor) == "0":
            return sorted(names)


async def _names(redis: Commands, key: str, tenant: str) -> set[str]:
    fields = await redis.command("HGETALL", key)
    assert isinstance(fields, dict), fields
    return {_text(name) for name, raw in fields.items() if not _text(name).startswith("@") and _owner(raw) == tenant}


def _owner(raw: object) -> str | None:
    """None: everyone's, or one that cannot be read."""
    assert isinstance(raw, bytes), raw
    try:
        return msgspec.msgpack.decode(raw, type=AdapterEntry).tenant
    except msgspec.DecodeError:
        return None


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
