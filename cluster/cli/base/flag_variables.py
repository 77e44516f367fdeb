"""Variables of the environment in place of flags: TANDEM_MAX_MODEL_LEN=4k is --max-model-len 4k, in every verb with it.

The command line wins over them, and they over --config. Which ones there are follows from the flags of all verbs. A
flag that a verb of clients has under a name of `serve`, with another meaning, gives its own (`envvar`).
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup

from tandem.configs.environment import PREFIX, flag_variables

YIELDS: Mapping[str, Collection[str]] = {
    "url": ("redis_url", "app"),
    "redis_url": ("url",),
    "app": ("url",),
    "tenant": ("public",),
}
"""Flags, and those that say the same thing otherwise: its variable is not read where the command line has one. Of two
that are both variables, the first of this table gives way."""
ONLY_WITH: Mapping[str, Collection[str]] = {"cluster": ("address", "model", "port_range")}
"""Flags that are refused without this one, of verbs that have it: their variables, which other verbs know too, are not
read then."""


class FlagVariables:
    """The variables of one verb's flags. names: by name of a parameter of the verb."""

    def __init__(self, options: Collection[Any]) -> None:
        """options: of typer, without --help."""
        self._options = {option.name: option for option in options}
        self.names = {name: _variable_of(option) for name, option in self._options.items()}
        for option in options:
            option.envvar, option.show_envvar = None, False  # in --help
            if option.multiple:
                option.split_envvar_value = several

    def read(self, words: Sequence[str]) -> None:
        """Has typer read the variables that are set, but for flags that `words`, a command line, says otherwise."""
        found = flag_variables()
        names = {flag: name for name, one in self._options.items() for flag in (*one.opts, *one.secondary_opts)}
        given = {names[flag] for word in words if (flag := word.partition("=")[0]) in names}
        from_variables = {name for name, variable in self.names.items() if variable in found and name not in given}
        for flag, others in YIELDS.items():
            if flag in from_variables and not given.isdisjoint(others):
                from_variables.remove(flag)
        for flag, others in YIELDS.items():
            if flag in from_variables and not from_variables.isdisjoint(others):
                from_variables.remove(flag)
        for flag, others in ONLY_WITH.items():
            if flag in self._options and flag not in given | from_variables:
                from_variables.difference_update(others)
        for name, option in self._options.items():
            option.envvar = self.names[name] if name in from_variables else None

    def in_use(self) -> list[str]:
        """Names of the variables that are read."""
        return sorted(option.envvar for option in self._options.values() if option.envvar)

    def named_in(self, text: str) -> list[str]:
        """Variables that are read, of the flags that a text names."""
        flags = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", text))
        return [option.envvar for option in self._options.values() if option.envvar and flags.intersection(option.opts)]


def _variable_of(option: Any) -> str:
    """The one that its first long name says, such as TANDEM_INPUT_FILE of -i, --input-file."""
    long = next(name for name in option.opts if name.startswith("--"))
    return str(option.envvar or PREFIX + long.removeprefix("--").replace("-", "_").upper())


def several(text: str) -> list[str]:
    """The values of a flag that may be repeated: words, or the items of a JSON list. A JSON object is one value.
    An error of typer for what begins as such a list and is none."""
    if text.lstrip().startswith("{"):
        return [text]
    if not text.lstrip().startswith("["):
        return text.split()
    try:
        return [item if isinstance(item, str) else json.dumps(item) for item in json.loads(text)]
    except ValueError as error:
        raise typer.BadParameter(f"a value that begins with [ is no JSON list: {error}") from error


def variables_of(command: Any) -> set[str]:
    """The variables of all flags of a verb, or of all verbs in a group."""
    if isinstance(command, TyperGroup):
        return {name for one in command.commands.values() for name in variables_of(one)}
    return set(command.variables.names.values())


def unknown_variables(command: Any) -> Iterator[str]:
    """A line for each variable of ours that stands for no flag of `command`, which has all verbs. None has a value."""
    known = variables_of(command)
    for name in sorted(flag_variables().keys() - known):
        near = get_close_matches(name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known], n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        yield f"{name} in the environment is ignored: no verb has such a flag{hint}"
