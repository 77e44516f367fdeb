"""The words of the command line: verbs, their flags and the values that there are to choose from, read off typer."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

from typer.core import TyperGroup, TyperOption

from tandem.configs.options import option_named


class FlagWords(NamedTuple):
    """A flag. names: all that it has, `--no-...` too. value: a word for what follows it, None for a switch. choices:
    the values that there are, () where they are without number. repeated: it may be given several times."""

    names: tuple[str, ...]
    help: str
    value: str | None
    choices: tuple[str, ...]
    repeated: bool


class VerbWords(NamedTuple):
    """A verb. path: `("tenants", "add")`. choices: of its arguments."""

    path: tuple[str, ...]
    help: str
    flags: tuple[FlagWords, ...]
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(self.path)


HELP = FlagWords(("-h", "--help"), "Show a help message.", None, (), False)
GLOBAL = (FlagWords(("--version",), "Print the version.", None, (), False), HELP)


def verbs_of(root: Any) -> list[VerbWords]:
    """All verbs of a command of typer, those in groups too, in its order."""
    return list(_verbs(root, ()))


def groups_of(root: Any) -> dict[str, str]:
    """The names and first sentences of the help of groups, of a command of typer."""
    return {name: first_sentence(one.help) for name, one in root.commands.items() if isinstance(one, TyperGroup)}


def first_sentence(text: str | None) -> str:
    """The part of a help text that one line of a shell has room for, on one line."""
    words = " ".join((text or "").split())
    end = words.find(". ")
    return (words if end < 0 else words[: end + 1]).removesuffix(".")


def _verbs(command: Any, path: tuple[str, ...]) -> Iterator[VerbWords]:
    for name, one in command.commands.items():
        if isinstance(one, TyperGroup):
            yield from _verbs(one, (*path, name))
            continue
        flags = [_flag(param) for param in one.params if isinstance(param, TyperOption) and not param.hidden]
        arguments = [param for param in one.params if not isinstance(param, TyperOption)]
        choices = tuple(choice for param in arguments for choice in param.type_descriptor.choices or ())
        yield VerbWords((*path, name), first_sentence(one.help), (*flags, HELP), choices)


def _flag(param: Any) -> FlagWords:
    option = option_named(param.name)
    choices: Sequence[str] = param.type_descriptor.choices or ()
    if option is not None and get_origin(option.kind) is Literal:
        choices = get_args(option.kind)
    value = None if param.is_flag else param.metavar or "TEXT"
    names = tuple(dict.fromkeys((*param.opts, *param.secondary_opts)))
    return FlagWords(names, first_sentence(param.help), value, tuple(map(str, choices)), bool(param.multiple))
