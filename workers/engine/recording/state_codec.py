"""EngineState to bytes and back: the objects of an engine at one moment, with everything that they hold.

A recording that has lost its beginning starts with one: no resumed request would do, as block ids, rows, counters and
measured averages decide what is planned next. Objects are a table of nodes that refer to one another by number, so that
what is shared or circular stays so; lists and dicts of plain values pass through msgpack as they are, which makes a
pool of 100,000 blocks a matter of milliseconds. Dicts and deques keep their order.

Only classes of the engine, of the tiers' index and of messages are made, without their constructors, and nothing else
is called: a file that somebody else wrote runs no code. What is outside of the engine (clock, executor, sink) is left
out by name, and given again to decode_state(). Called between two turns, by the engine's thread.
"""

import importlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from enum import Enum
from functools import cache
from pathlib import Path
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import msgspec

from tandem.configs.errors import TandemError
from tandem.offload.kv.host_tier import NoIndex
from tandem.offload.kv.slot_index import SlotIndex

ROOMS = ("tandem.workers.engine.", "tandem.offload.kv.", "tandem.workers.messages.", "tandem.configs.schema")
"""Modules whose classes and functions a state may name."""
CLOSED = (
    "tandem.workers.engine.build_engine",
    "tandem.workers.engine.thread.",
    "tandem.workers.engine.recording.recording_file",
    "tandem.offload.kv.disk_io",
)
"""Modules there of which it may name nothing: they open, write or remove files."""
MESSAGES, FUNCTIONS, METHODS = "tandem.workers.messages.", "tandem.workers.engine.", ROOMS[:2]
LEAVES = frozenset({type(None), bool, int, float, str, bytes})
LISTS: dict[Any, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
DICTS: dict[Any, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "default"}
REFERENCE = 1
"""Code of the msgpack extension that is the number of a node."""


class StateError(TandemError):
    """An object that cannot be part of a state, or bytes that are none."""


Change = Callable[[object, str, Any], Any]
"""Given an object, the name of an attribute and its value: the value to encode in its place."""


class StateEncoder:
    """Encodes one state. outside: names of what is not part of it, by object. change: what hides ids (redaction.py);
    leaf: what it does to each plain value of a list, dict or attribute; None: nothing."""

    def __init__(
        self,
        outside: Mapping[str, object],
        change: Change | None = None,
        leaf: Callable[[Any], Any] | None = None,
    ) -> None:
        self._outside = {id(one): name for name, one in outside.items()}
        self._change = change
        self._leaf = leaf
        self._numbers: dict[int, int] = {}
        self._objects: list[Any] = []
        self._shapes: dict[tuple[str, ...], int] = {}

    def encode(self, root: object) -> bytes:
        """Returns the bytes of an object and of all that it reaches. StateError names what cannot be encoded."""
        self._reference(root)
        nodes: list[Any] = []
        for one in self._objects:  # grows meanwhile
            nodes.append(self._node(one))
        return msgspec.msgpack.encode([list(self._shapes), nodes])

    def _value(self, value: Any) -> Any:
        if type(value) in LEAVES:
            return value if self._leaf is None else self._leaf(value)
        return self._reference(value)

    def _reference(self, value: Any) -> msgspec.msgpack.Ext:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # which also keeps its id
        return msgspec.msgpack.Ext(REFERENCE, number.to_bytes(4, "big"))

    def _values(self, given: Any) -> list[Any]:
        values: list[Any] = list(given)
        if self._leaf is None and LEAVES.issuperset(map(type, values)):
            return values
        return [self._value(value) for value in values]

    def _node(self, one: Any) -> list[Any]:
        kind: Any = type(one)
        if id(one) in self._outside:
            return ["outside", self._outside[id(one)]]
        if kind in LISTS:
            return [LISTS[kind], self._values(one), one.maxlen if kind is deque else None]
        if kind in DICTS:
            factory = one.default_factory if isinstance(one, defaultdict) else None
            return [DICTS[kind], self._values(one.keys()), self._values(one.values()), factory and factory.__name__]
        if kind is MethodType or kind is BuiltinMethodType:
            return ["method", self._reference(one.__self__), one.__name__]
        if kind is FunctionType:
            return ["global", named(one)]
        if kind is range:
            return ["range", one.start, one.stop, one.step]
        if isinstance(one, Enum):
            return ["enum", named(kind), one.name]
        return self._instance(one, kind)

    def _instance(self, one: Any, kind: Any) -> list[Any]:
        if kind is SlotIndex:
            return ["class", self._shape(NoIndex, ()), []]
        if kind is ExitStack:
            return ["stack"]
        if isinstance(one, Path):
            return ["path", str(one)]
        change = self._change
        if isinstance(one, msgspec.Struct):
            one = one if change is None else change(one, "", one)
            if kind.__module__.startswith(MESSAGES):
                return ["message", named(kind), msgspec.msgpack.encode(one)]
            return ["tuple of", named(kind), [self._value(getattr(one, field)) for field in kind.__struct_fields__]]
        if isinstance(one, tuple):
            return ["tuple of", named(kind), self._values(one)]
        names = tuple(attributes_of(one))
        values = [getattr(one, name) for name in names]
        if change is not None:
            values = [change(one, name, value) for name, value in zip(names, values, strict=True)]
        return ["class", self._shape(kind, names), [self._value(value) for value in values]]

    def _shape(self, kind: type, names: tuple[str, ...]) -> int:
        """Returns the number of a class with these attributes, which are named once for all its objects."""
        return self._shapes.setdefault((named(kind), *names), len(self._shapes))


def attributes_of(one: object) -> list[str]:
    """Returns the names of the attributes that an object has."""
    names = [*getattr(one, "__dict__", ())]
    slots = [slot for base in type(one).__mro__ for slot in vars(base).get("__slots__", ())]
    return names + [slot for slot in slots if slot not in ("__dict__", "__weakref__") and hasattr(one, slot)]


def named(thing: type | FunctionType) -> str:
    """Returns the name of a class or function; StateError if no state may name it."""
    if not _is_open(thing.__module__) or "<" in thing.__qualname__:
        raise StateError(f"{thing.__module__}.{thing.__qualname__} cannot be part of a recording")
    return f"{thing.__module__}:{thing.__qualname__}"


def _is_open(module: str) -> bool:
    return module.startswith(ROOMS) and not module.startswith(CLOSED)


@cache
def _found(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if not _is_open(module):
        raise StateError(f"a recording names {name!r}, which is no part of an engine")
    try:
        found: Any = importlib.import_module(module)
        for part in qualified.split("."):
            found = vars(found)[part]
    except (ImportError, KeyError):
        raise StateError(f"a recording names {name!r}, which this version does not have") from None
    if not _is_open(getattr(found, "__module__", None) or ""):  # what the module has from elsewhere
        raise StateError(f"a recording names {name!r}, which is no part of an engine")
    return found


class _StateDecoder:
    """Makes the objects of one table of nodes: first all that may be part of a circle, empty; then what they hold."""

    def __init__(self, shapes: list[list[str]], nodes: list[Any], outside: Mapping[str, object]) -> None:
        self._shapes = [(_class(name), names) for name, *names in shapes]
        self._nodes = nodes
        self._outside = outside
        self._made: dict[int, Any] = {}

    def decode(self) -> Any:
        root = self._object(0)
        for number in range(len(self._nodes)):
            self._object(number)
        for number, node in enumerate(self._nodes):
            self._fill(self._made[number], node)
        return root

    def _value(self, value: Any) -> Any:
        if isinstance(value, msgspec.msgpack.Ext):
            return self._object(int.from_bytes(value.data, "big"))
        return value

    def _values(self, values: list[Any]) -> list[Any]:
        return [self._value(value) for value in values]

    def _object(self, number: int) -> Any:
        if number not in self._made:
            self._made[number] = self._make(*self._nodes[number])
        return self._made[number]

    def _make(self, kind: str, *parts: Any) -> Any:
        if kind in EMPTY:
            return EMPTY[kind](*parts)
        if kind == "class":
            return object.__new__(self._shapes[parts[0]][0])
        if kind in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[kind](self._values(parts[0]))
        if kind == "outside":
            return self._outside[parts[0]]
        if kind == "tuple of":
            return _tuple_of(_class(parts[0]), self._values(parts[1]))
        if kind == "message":
            return _message(_class(parts[0]), parts[1])
        if kind == "enum":
            return _member(_class(parts[0]), parts[1])
        if kind == "method":
            return self._method(self._value(parts[0]), parts[1])
        if kind == "global":
            return _function(parts[0])
        raise StateError(f"a recording has a node of the unknown kind {kind!r}")

    def _method(self, owner: Any, name: str) -> Any:
        """Returns a bound method: of an object of the engine, of what is outside, or a list's append."""
        is_ours = type(owner).__module__.startswith(METHODS) or any(owner is one for one in self._outside.values())
        found = getattr(owner, name) if is_ours or (type(owner) is list and name == "append") else None
        if name.startswith("__") or not isinstance(found, MethodType | BuiltinMethodType):
            raise StateError(f"a recording names the method {name!r} of a {type(owner).__name__}")
        return found

    def _fill(self, made: Any, node: list[Any]) -> None:
        kind = node[0]
        if kind in ("list", "deque"):
            made.extend(self._values(node[1]))
        elif kind == "set":
            made.update(self._values(node[1]))
        elif kind in DICTS.values():
            for key, value in zip(self._values(node[1]), self._values(node[2]), strict=True):
                made[key] = value
        elif kind == "class":
            for name, value in zip(self._shapes[node[1]][1], self._values(node[2]), strict=True):
                object.__setattr__(made, name, value)


EMPTY: dict[str, Callable[..., Any]] = {
    "list": lambda *parts: [],
    "set": lambda *parts: set(),
    "deque": lambda values, most: deque(maxlen=most),
    "dict": lambda *parts: {},
    "ordered": lambda *parts: OrderedDict(),
    "counter": lambda *parts: Counter(),
    "default": lambda keys, values, factory: defaultdict({"int": int, "float": float, "list": list}[factory]),
    "stack": ExitStack,
    "path": Path,
    "range": range,
}


def _class(name: str) -> Any:
    found = _found(name)
    if not isinstance(found, type):
        raise StateError(f"a recording names {name!r} as a class")
    return found


def _function(name: str) -> Any:
    found = _found(name)
    if not isinstance(found, FunctionType) or not found.__module__.startswith(FUNCTIONS):
        raise StateError(f"a recording names {name!r} as a function")
    return found


def _tuple_of(kind: Any, values: list[Any]) -> Any:
    if issubclass(kind, msgspec.Struct):
        return kind(**dict(zip(kind.__struct_fields__, values, strict=True)))
    if not issubclass(kind, tuple):
        raise StateError(f"a recording names {kind.__qualname__} as a tuple")  # whose constructor might do something
    return tuple.__new__(kind, values)


def _message(kind: Any, data: bytes) -> Any:
    if not issubclass(kind, msgspec.Struct) or not kind.__module__.startswith(MESSAGES):
        raise StateError(f"a recording names {kind.__qualname__} as a message")
    return msgspec.msgpack.decode(data, type=kind)


def _member(kind: Any, name: str) -> Any:
    if not issubclass(kind, Enum):
        raise StateError(f"a recording names {kind.__qualname__} as an enumeration")
    return kind[name]


def decode_state(data: bytes, outside: Mapping[str, object]) -> Any:
    """Returns the object that a StateEncoder has encoded. outside: what takes the place of what was left out.
    StateError for bytes that are no state of this version."""
    try:
        shapes, nodes = msgspec.msgpack.decode(data)
        return _StateDecoder(shapes, nodes, outside).decode()
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StateError(f"the state of the engine in the recording cannot be read: {error}") from error
