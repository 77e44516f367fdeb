"""Flags of typer commands from tables: the rows of configs/options.py, and flags that several verbs share."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from tandem.configs.foreign_flags import FOREIGN, REFUSED, SWITCHES
from tandem.configs.load import default_of
from tandem.configs.options import OPTIONS, Option

Command = Callable[..., None]


def flag(name: str, kind: Any, *names: str, **words: Any) -> inspect.Parameter:
    """A command's parameter for an optional flag, None where it is not given. names: of the flag, by default --NAME
    with dashes. words: help, metavar and rich_help_panel of typer.Option."""
    info = typer.Option(*(names or (f"--{name.replace('_', '-')}",)), show_default=False, **words)
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_flags(function: Command, name: str, flags: Sequence[inspect.Parameter], value: Callable[..., Any]) -> Command:
    """Makes a command that has `flags` in place of the parameter `name` of `function`. `value` makes the argument for
    `name` from those of the flags."""

    def command(**arguments: Any) -> None:
        given = {parameter.name: arguments.pop(parameter.name) for parameter in flags}
        function(**arguments, **{name: value(**given)})

    own = inspect.signature(function).parameters.values()
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for place in own
        for parameter in (flags if place.name == name else [place])
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = function.__doc__
    return command


def with_service_options(leave_out: frozenset[str] = frozenset()) -> Callable[[Command], Command]:
    """Makes `function(..., flags)` a command with the flags of configs/options.py. `flags` holds those that were given,
    by option name, and vLLM's that have no effect (configs/foreign_flags.py). leave_out: options without a meaning for
    this command; it refuses them."""
    flags = [_parameter(option) for option in OPTIONS if option.name not in leave_out]
    flags += [_foreign(name) for name in (*FOREIGN, *REFUSED) if "." not in name]
    return partial(with_flags, name="flags", flags=flags, value=_given)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != []}


def _parameter(option: Option) -> inspect.Parameter:
    names = [option.flag, *option.aliases]
    if option.kind is bool and default_of(option):
        names[0] = f"{option.flag}/--no-{option.name.replace('_', '-')}"
    words = {"help": _help(option), "metavar": _metavar(option), "rich_help_panel": option.group}
    return flag(option.name, _cli_type(option), *names, **words)


def _foreign(name: str) -> inspect.Parameter:
    """A flag of vLLM, which --help does not show."""
    spelled = name.replace("_", "-")
    if name in SWITCHES:
        return flag(name, bool, f"--{spelled}/--no-{spelled}", hidden=True)
    return flag(name, str, f"--{spelled}", *(["-O"] if name == "optimization_level" else []), hidden=True)


def _cli_type(option: Option) -> Any:
    """The type that typer parses. configs/load.py checks ranges, choices, sizes and JSON."""
    if get_origin(option.kind) is tuple:
        return list[str]
    return option.kind if option.kind in (bool, int, float) and not option.size else str


LONGEST_METAVAR = 50
"""Characters of choices beside a flag; where there are more, its help names them."""


def _metavar(option: Option) -> str | None:
    if option.kind is bool:
        return None
    if get_origin(option.kind) is Literal:
        choices = "|".join(get_args(option.kind))
        return choices if len(choices) <= LONGEST_METAVAR else "NAME"
    return {int: "N", float: "X"}.get(option.kind, "TEXT")


def _help(option: Option) -> str:
    default = default_of(option)
    if default is None or default in ((), {}) or "Default:" in option.help:
        return option.help
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f"{option.help} Default: {shown}."
