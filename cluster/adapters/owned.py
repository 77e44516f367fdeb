"""Which adapters a tenant has of its own, beside every base model of a Redis. Read before a tenant is removed."""

import msgspec

from tandem.cluster.adapters.entries import AdapterEntry
from tandem.cluster.state import keys
from tandem.cluster.state.redis_client import Commands


async def adapters_of(redis: Commands, tenant: str) -> list[str]:
    """Their names, sorted. RedisUnavailable."""
    models = await redis.command("SMEMBERS", keys.ADAPTER_MODELS)
    assert isinstance(models, set | list), models
    found = [await _names(redis, keys.adapters(_text(model)), tenant) for model in models]
    return sorted(set().union(*found))


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
