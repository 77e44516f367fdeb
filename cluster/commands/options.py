"""Makes a typer command take every row of configs/options.py as a flag, with its help, default and group."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from configs.load import default_of
from configs.options import OPTIONS, Option


def with_service_options(function: Callable[..., None], leave_out: frozenset[str] = frozenset()) -> Callable[..., None]:
    """`function(..., flags)` becomes a command whose `flags` holds the given options only, by option name.

    leave_out: options that mean nothing to this command, so that they are refused and not ignored.
    """
    options = [option for option in OPTIONS if option.name not in leave_out]
    own = [p for name, p in inspect.signature(function).parameters.items() if name != "flags"]

    def command(**arguments: Any) -> None:
        flags = {o.name: given for o in options if _is_given(given := arguments.pop(o.name))}
        function(**arguments, flags=flags)

    parameters = [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own), *(_parameter(o) for o in options)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__doc__ = function.__doc__
    return command


def _is_given(value: Any) -> bool:
    return value is not None and value != []


def _parameter(option: Option) -> inspect.Parameter:
    names = [option.flag, *option.aliases]
    if option.kind is bool and default_of(option):
        names[0] = f"{option.flag}/--no-{option.name.replace('_', '-')}"
    info = typer.Option(
        *names, help=_help(option), rich_help_panel=option.group, show_default=False, metavar=_metavar(option)
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_cli_type(option), info],
    )


def _cli_type(option: Option) -> Any:
    """What typer parses; ranges, choices, sizes and JSON are checked by configs/load.py."""
    if option.kind is bool:
        return bool | None
    if get_origin(option.kind) is tuple:
        return list[str] | None
    if option.kind in (int, float) and not option.size:
        return option.kind | None
    return str | None


def _metavar(option: Option) -> str | None:
    if option.kind is bool:
        return None
    if get_origin(option.kind) is Literal:
        return "|".join(get_args(option.kind))
    return {int: "N", float: "X"}.get(option.kind, "TEXT") if option.kind in (int, float) else "TEXT"


def _help(option: Option) -> str:
    default = default_of(option)
    if default is None or default in ((), {}) or "Default:" in option.help:
        return option.help
    shown = {True: "on", False: "off"}.get(default, default) if isinstance(default, bool) else default
    return f"{option.help} Default: {shown}."
