"""Fields: the keys of a quantization_config, each read once; what nobody has read is refused. Torch-free."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from tandem.configs.errors import UnsupportedModelError

UNQUANTIZED: Final = (
    "take the model that it was made of, in bf16, fp16 or float32 (--quantization int8 holds that in less memory)"
)
"""The help where a quantized checkpoint is refused."""
_ABSENT: Final = object()


class Fields:
    """Keys of an object of config.json. where: what it is called in errors."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, Mapping):
            raise UnsupportedModelError(f"{where} is {given!r}, want an object", "MODEL")
        self._given, self.where = given, where
        self._unread = dict.fromkeys(str(key) for key in given)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a value; null counts as absent."""
        self._unread.pop(key, None)
        value = self._given.get(key)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns an integer."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refused(key, value, "want an integer")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns true or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, value, "want true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Returns a string."""
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.refused(key, value, "want a string")
        return value.lower()

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings; none where it is absent."""
        value = self.get(key, [])
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise self.refused(key, value, "want a list of strings")
        return tuple(value)

    def one_of(self, key: str, allowed: Collection[Any], default: Any = None) -> Any:
        """Returns a value that is one of those that are read."""
        value = self.get(key, default)
        if value not in allowed:
            raise self.refused(key, value, f"read: {', '.join(map(str, allowed))}")
        return value

    def within(self, key: str) -> "Fields | None":
        """Returns the keys of an object in it."""
        value = self.get(key)
        return None if value is None else Fields(value, f"{self.where}.{key}")

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """Returns a list of integers; None where it is absent."""
        value = self.get(key)
        if value is not None and not (isinstance(value, list | tuple) and all(isinstance(each, int) for each in value)):
            raise self.refused(key, value, "want a list of integers")
        return None if value is None else tuple(value)

    def block(self, key: str) -> tuple[int, int] | None:
        """Returns a number of outputs and one of inputs; None where it is absent."""
        value = self.numbers(key)
        if value is not None and (len(value) != 2 or min(value) < 1):
            raise self.refused(key, list(value), "want two positive integers")
        return None if value is None else (value[0], value[1])

    def group(self, key: str, default: int) -> int | None:
        """Returns the inputs of a group; None for -1, which is all of them."""
        value = self.whole(key, default)
        if value < 1 and value != -1:
            raise self.refused(key, value, "want a positive integer, or -1 for all inputs")
        return None if value == -1 else value

    def all(self) -> dict[str, Any]:
        """Returns all keys and values."""
        return dict(self._given)

    def ignore(self, *keys: str) -> None:
        """Marks keys that change nothing that is computed."""
        for key in keys:
            self._unread.pop(key, None)

    def done(self) -> None:
        """UnsupportedModelError for a key that nobody has read, unless it is null, false or empty."""
        for key in self._unread:
            if self._given[key] not in (None, False, [], {}, ""):
                raise self.refused(key, self._given[key], "which is not known")

    def refused(self, key: str, value: Any, words: str) -> UnsupportedModelError:
        """Returns the error for a value that is not read."""
        return UnsupportedModelError(f"{self.where}: {key} is {value!r}, {words}; {UNQUANTIZED}", "MODEL")
