"""How verbs show `--help`: options in their groups, plain text, no flag ever cut short however narrow the terminal.

Typer's own tables cut long flags with an ellipsis at 80 columns; click's definition lists wrap the text instead.
"""

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperOption


class GroupedHelp(TyperCommand):
    """A verb whose options are listed under their groups (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called by typer. A section per group, in the order of the options."""
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
