"""Terminal output of the verbs: help, tables, and notes on standard error."""

from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from tandem.configs.errors import SettingsError
from tandem.configs.lora_modules import FLAG as LORA_MODULES
from tandem.configs.lora_modules import looks_like_module, repeat_flag
from tandem.configs.options import not_needed


class GroupedHelp(TyperCommand):
    """A verb whose `--help` lists options under their groups (`rich_help_panel`) and wraps long lines.

    Typer's own tables shorten long flags with an ellipsis at 80 columns; click's definition lists keep them whole.
    Several adapters may follow one --lora-modules, for which typer has no options.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Called by typer with the words behind the verb. SettingsError for a flag of vLLM that is not needed here."""
        try:
            return super().parse_args(ctx, repeat_flag(args, LORA_MODULES, looks_like_module))
        except Exception as error:
            flag = getattr(error, "option_name", None)  # of click's NoSuchOption, which typer keeps to itself
            if isinstance(flag, str) and (why := not_needed(flag)):
                raise SettingsError(why, flag) from error
            raise

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
