"""docs/compatibility.md promises who reads whose messages and whose data: both are written down beside this file.

python -m tests.unit.docs.test_layouts      # writes wire_messages.txt and redis_keys.txt
"""

import inspect
import re
from pathlib import Path

import msgspec

from tandem.cluster.state import keys
from tandem.cluster.wire.version import WIRE_VERSION
from tandem.workers.messages import course, kv_events, request, sampling_ranges, thinking

MESSAGES = Path(__file__).parent / "wire_messages.txt"
KEYS = Path(__file__).parent / "redis_keys.txt"


def messages() -> list[str]:
    """The wire version, and the fields of each message in their order, which is their place on the wire."""
    modules = (course, kv_events, request, sampling_ranges, thinking)
    found = {name: kind for module in modules for name, kind in vars(module).items() if is_message(kind)}
    fields = [f"{name}: {' '.join(kind.__struct_encode_fields__)}" for name, kind in sorted(found.items())]
    return [f"version {WIRE_VERSION}", *fields]


def is_message(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and bool(kind.__struct_config__.array_like)


def redis_keys() -> list[str]:
    """The text of every key, with the parameters in braces."""
    source = inspect.getsource(keys)
    return sorted(set(re.findall(r'f?"(tandem:[^"]*)"', source)) - {"tandem:"})


def test_messages_change_only_at_their_ends() -> None:
    promised, now = MESSAGES.read_text().splitlines(), messages()
    if promised[0] == now[0]:
        today = dict(line.split(": ", 1) for line in now[1:])
        changed = [
            line for line in promised[1:] if not f"{today.get(line.split(': ')[0])} ".startswith(line.split(": ")[1])
        ]
        assert not changed, "the other end cannot read this: count WIRE_VERSION up (cluster/wire/version.py)"
    assert now == promised, "run `python -m tests.unit.docs.test_layouts`: new fields have defaults"


def test_keys_keep_their_names() -> None:
    gone = set(KEYS.read_text().splitlines()) - set(redis_keys())
    assert not gone, f"data under {gone} would not be found: docs/compatibility.md says what an upgrade owes"
    assert redis_keys() == KEYS.read_text().splitlines(), "run `python -m tests.unit.docs.test_layouts`"


if __name__ == "__main__":
    MESSAGES.write_text("\n".join(messages()) + "\n")
    KEYS.write_text("\n".join(redis_keys()) + "\n")
