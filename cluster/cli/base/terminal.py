"""Terminal output of the verbs: help, tables, and notes on standard error."""

from difflib import SequenceMatcher
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from tandem.cluster.cli.base.flag_variables import FlagVariables, unknown_variables
from tandem.cluster.cli.base.vllm_words import respelled, with_lists
from tandem.configs.environment import PREFIX
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.foreign_flags import FOREIGN

ALIKE = 0.8
"""Likeness of a flag that is offered in place of one that there is not; 1 is the same."""

VARIABLES = (
    f"A flag may also be a variable of the environment: {PREFIX}LOG_LEVEL=debug is --log-level debug. The command line "
    "wins over variables, and variables over --config."
)


class GroupedHelp(TyperCommand):
    """A verb whose `--help` lists options under their groups (`rich_help_panel`) and wraps long lines.

    Typer's own tables shorten long flags with an ellipsis at 80 columns; click's definition lists keep them whole.
    Verbs with the settings of a service read command lines written for vLLM (vllm_words.py). Flags that are not given
    are read from the environment (flag_variables.py); an error names the variable that it is about.
    """

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.variables = FlagVariables([param for param in self.params if isinstance(param, TyperOption)])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called by typer with the words behind the verb. SettingsError for a model that is given twice."""
        takes_value = {
            name: not param.is_flag
            for param in self.get_params(ctx)
            if isinstance(param, TyperOption)
            for name in (*param.opts, *param.secondary_opts)
        }
        if any(f"--{name.replace('_', '-')}" in takes_value for name in FOREIGN):
            args = respelled(args, takes_value)
        elif not any(isinstance(param, TyperArgument) for param in self.get_params(ctx)):
            args = with_lists(args, _lists(self.get_params(ctx)))
        self.variables.read(args)
        if set(args).isdisjoint(ctx.help_option_names):
            for line in unknown_variables(ctx.find_root().command):
                say(line)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            flag = getattr(error, "option_name", None)  # of click's NoSuchOption, which typer keeps to itself
            if isinstance(flag, str):
                error.possibilities = _alike(flag, takes_value)  # type: ignore[attr-defined]
            param = getattr(error, "param", None)
            if isinstance(param, TyperOption) and param.envvar is not None:
                param.show_envvar = True  # in the message
            raise

    def invoke(self, ctx: Any) -> Any:
        """Called by typer to run the verb. An error that names a flag names its variable too, if it was read."""
        try:
            return super().invoke(ctx)
        except TandemError as error:
            if not (names := self.variables.named_in(str(error))):
                raise
            flag = error.flag if isinstance(error, SettingsError) else None
            raise SettingsError(f"{error} (from {' and '.join(names)} in the environment)", flag) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called by typer. Writes a section per group, in the order of the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_group(param), []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Called by typer. Says how flags are given as variables."""
        formatter.write_paragraph()
        formatter.write_text(VARIABLES)


def _lists(params: Any) -> set[str]:
    """The flags that may be given several times."""
    return {name for param in params if isinstance(param, TyperOption) and param.multiple for name in param.opts}


def _alike(flag: str, flags: Any) -> list[str]:
    """Flags that are written nearly as `flag`, or begin with it."""
    return [one for one in flags if one.startswith(flag) or SequenceMatcher(None, flag, one).ratio() >= ALIKE]


def _group(param: Any) -> str:
    if isinstance(param, TyperArgument):
        return "Arguments"
    return (param.rich_help_panel if isinstance(param, TyperOption) else None) or "Options"


def say(text: str) -> None:
    """Prints a note on standard error. Standard output is for a verb's results."""
    typer.echo(f"tandem: {text}", err=True)


def table(rows: list[list[str]], num_names: int = 1) -> list[str]:
    """Formats rows as lines with columns as wide as their widest cell, right-aligned after the first `num_names`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < num_names else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
