"""The page of all commands: verbs, arguments and flags, with their defaults and variables of the environment."""

import re
from collections.abc import Iterator
from typing import Any

import typer.main
from typer.core import TyperOption

from tandem.cluster.cli.main import build_app
from tandem.cluster.cli.shells.command_words import VerbWords, verbs_of
from tandem.configs.load import default_of
from tandem.configs.options import option_named

HEAD = """# Commands

<!-- Written by tools/reference.py (make reference). -->

All verbs of `tandem` and their flags, with what `tandem VERB --help` says. Each flag is also
[a variable of the environment](../serving/start.md#variables-of-the-environment), and those of `serve` are keys of
`--config`, of `engine_kwargs` and of the other sections of a Serve file, with underscores. `N` is a whole number, `X` a
number. Sizes are numbers with an optional suffix: k, m, g are decimal, K, M, G binary. Flags of vLLM that change
nothing here are [taken too](../serving/start.md#command-lines-of-vllm), and in no table.

| command | does |
|---|---|
"""
TABLE = "| flag | meaning | default | variable |\n|---|---|---|---|\n"
DEFAULT = re.compile(r"\s*Default: (.*)$", re.DOTALL)


def cli_page() -> str:
    """Return the text of docs/reference/cli.md."""
    root: Any = typer.main.get_command(build_app())
    verbs = verbs_of(root)
    rows = [f"| [`tandem {verb.name}`](#tandem-{'-'.join(verb.path)}) | {cell(verb.help)} |\n" for verb in verbs]
    return HEAD + "".join(rows) + "".join(part for verb in verbs for part in _section(root, verb))


def _section(root: Any, verb: VerbWords) -> Iterator[str]:
    command = root
    for name in verb.path:
        command = command.commands[name]
    arguments = [param for param in command.params if not isinstance(param, TyperOption)]
    named = " ".join(param.metavar if param.required else f"[{param.metavar}]" for param in arguments)
    yield f"\n## tandem {verb.name}\n\n    tandem {verb.name} {named}".rstrip() + "\n\n"
    yield f"{_paragraphs(command.help)}\n"
    if arguments:
        yield "\n| argument | meaning |\n|---|---|\n"
        yield from (f"| `{param.metavar}` | {cell(param.help or '')} |\n" for param in arguments)
    own = [param for param in command.params if isinstance(param, TyperOption) and not param.hidden]
    shared = [param for param in own if verb.name != "serve" and _is_setting(param, root)]
    groups: dict[str, list[Any]] = {}
    for param in (param for param in own if param not in shared):
        groups.setdefault(param.rich_help_panel or "", []).append(param)
    for title, params in groups.items():
        yield f"\n### {title}\n\n{TABLE}" if title else f"\n{TABLE}"
        yield from (_row(param, command.variables.names[param.name]) for param in params)
    if shared:
        names = ", ".join(f"`{param.opts[0]}`" for param in shared)
        yield f"\nAnd, as [`tandem serve`](#tandem-serve) has them: {names}.\n"


def _is_setting(param: Any, root: Any) -> bool:
    """True if it is the flag that `serve` has, with the same words."""
    return any(one.name == param.name and one.help == param.help for one in root.commands["serve"].params[1:])


def _row(param: Any, variable: str) -> str:
    names = ", ".join(f"`{name}`" for name in dict.fromkeys((*param.opts, *param.secondary_opts)))
    value = "" if param.is_flag else f" {(param.metavar or _kind(param)).replace('|', ' or ')}"
    text, default = _parts(param)
    needed = "**required**" if param.required else cell(default)
    return f"| {names}{cell(value)} | {cell(text)} | {needed} | `{variable}` |\n"


def _parts(param: Any) -> tuple[str, str]:
    """What a flag means, and its default in words."""
    option = option_named(param.name)
    found = DEFAULT.search(param.help)
    text = param.help[: found.start()] if found else param.help
    if found:
        default = found[1].removesuffix(".")
        return text, default[:1].lower() + default[1:] if default[1:2].islower() else default
    if param.is_flag:
        return text, "on" if option is not None and default_of(option) else "off"
    return text, "none" if param.default in (None, (), []) else str(param.default)


def _kind(param: Any) -> str:
    choices = param.type_descriptor.choices
    if choices:
        return " or ".join(map(str, choices))
    kinds = {"int": "N", "float": "X"}
    annotation = str(param.type_descriptor.annotation)
    return next((word for kind, word in kinds.items() if kind in annotation), "TEXT")


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.strip().split("\n\n"))


def cell(text: str) -> str:
    """A text as it stands in a cell of a table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
