"""Groups of flags as dataclasses: each field is a flag, its default the flag's, and a command gets the filled object.

@dataclass(frozen=True, kw_only=True)
class Traffic:
    request_rate: float = setting("Requests a second.", default=inf, above=0)    # --request-rate
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from functools import partial
from inspect import Parameter
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from tandem.cluster.cli.base.flags import Command, flag, with_flags
from tandem.configs.errors import SettingsError

T = TypeVar("T")
BOUNDS: Final[Mapping[str, tuple[Callable[[Any, Any], bool], str]]] = {
    "least": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "most": (operator.le, "at most"),
}


def setting(
    help: str,
    *,
    default: Any = None,
    names: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    shown: str | None = None,
    variable: str | None = None,
    **bounds: float,
) -> Any:
    """Makes a field that is a flag. names: of the flag, by default --FIELD with dashes. choices: all values that there
    are. shown: what the help says of the default, if not the value. variable: of the environment, in place
    of the group's prefix and the name. bounds: `least`, `above` or `most` of a number."""
    words = {"help": help, "names": names, "choices": choices, "shown": shown, "bounds": bounds}
    words["variable"] = variable
    return field(default=default, metadata=words)


def with_group(name: str, group: type[Any], panel: str, prefix: str) -> Callable[..., Any]:
    """Decorates a command: its parameter `name` becomes the flags of `group`'s fields, and gets the object that they
    make. panel: their title in the help. prefix: of their variables of the environment. The command raises
    SettingsError for values out of bounds."""
    hints = get_type_hints(group)
    flags = [_parameter(one, hints[one.name], panel, prefix) for one in fields(group)]
    return partial(_decorated, name=name, flags=flags, made=partial(_made, group))


def _decorated(function: Command, name: str, flags: list[Parameter], made: Callable[..., Any]) -> Command:
    return with_flags(function, name, flags, made)


def flag_name(one: Field[Any]) -> str:
    """The flag of a field: --request-rate."""
    names: tuple[str, ...] = one.metadata["names"]
    return names[0].partition("/")[0] if names else f"--{one.name.replace('_', '-')}"


def _parameter(one: Field[Any], kind: Any, panel: str, prefix: str) -> Parameter:
    kinds = [each for each in get_args(kind) if each is not type(None)] if get_origin(kind) is not tuple else []
    is_list = get_origin(kind) is tuple
    plain = list[str] if is_list else kinds[0] if kinds else kind
    names = one.metadata["names"] or (flag_name(one),)
    if plain is bool and one.default is not False:
        names = (f"{names[0]}/--no-{names[0].removeprefix('--')}", *names[1:])
    words = {"help": _help(one), "rich_help_panel": panel, "metavar": _metavar(one, plain)}
    words["envvar"] = one.metadata["variable"] or f"{prefix}{one.name.upper()}"
    return flag(one.name, plain, *names, **words)


def _metavar(one: Field[Any], kind: Any) -> str | None:
    if one.metadata["choices"]:
        return "NAME"
    return {int: "N", float: "X", str: "TEXT", list[str]: "TEXT ..."}.get(kind)


def _help(one: Field[Any]) -> str:
    choices = one.metadata["choices"]
    said: str = one.metadata["help"]
    said += f" One of {', '.join(choices)}." if choices else ""
    shown = one.metadata["shown"]
    if shown is None and one.default not in (None, False, ()):
        shown = f"{one.default:g}" if isinstance(one.default, float) else str(one.default)
    return f"{said} Default: {shown}." if shown else said


def _made(group: type[T], **given: Any) -> T:
    """The group's object. SettingsError with the flag for a value that is no choice or out of bounds."""
    values = {name: value for name, value in given.items() if value is not None and value != []}
    for one in fields(group):  # type: ignore[arg-type]  # a dataclass
        if one.name in values:
            value = values[one.name]
            _check(one, value)
            values[one.name] = tuple(value) if isinstance(value, list) else value
    return group(**values)


def _check(one: Field[Any], value: Any) -> None:
    choices = one.metadata["choices"]
    if choices and value not in choices:
        raise SettingsError(f"{value}: not one of {', '.join(choices)}", flag_name(one))
    for kind, bound in one.metadata["bounds"].items():
        holds, words = BOUNDS[kind]
        if not holds(value, bound):  # never true of NaN
            raise SettingsError(f"{value:g} must be {words} {bound:g}", flag_name(one))
