"""The console script `tandem`: one verb per file of cluster/commands. Imports nothing heavy before a verb runs."""

import os
import sys
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from cluster.commands.adapters import adapters_app
from cluster.commands.chat import chat
from cluster.commands.check_config import check_config
from cluster.commands.complete import complete
from cluster.commands.help import GroupedHelp
from cluster.commands.plan import plan
from cluster.commands.run_batch import run_batch
from cluster.commands.serve import serve
from cluster.commands.status import status
from cluster.commands.tenants import tenants_app
from cluster.commands.usage import usage
from configs.errors import TandemError

VERBS = (
    ("serve", serve),
    ("run-batch", run_batch),
    ("chat", chat),
    ("complete", complete),
    ("plan", plan),
    ("status", status),
    ("usage", usage),
    ("check-config", check_config),
)


def build_app() -> typer.Typer:
    """All verbs."""
    app = typer.Typer(
        name="tandem",
        help="Serve large language models on a cluster: OpenAI API, tensor and pipeline parallel groups.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    app.add_typer(adapters_app(), name="adapters")
    for name, verb in VERBS:
        app.command(name, cls=GroupedHelp)(verb)
    app.add_typer(tenants_app(), name="tenants")
    return app


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tandem {version('tandem-serve')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the verb; typer runs their callbacks."""


def main() -> NoReturn:
    """Entry point. Where Ray was loaded, its C++ threads may run still and crash an interpreter that ends in order;
    by now there is nothing left to take down."""
    try:
        run_verb()
    except SystemExit as end:
        if "ray" in sys.modules and isinstance(end.code, int | None):
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(end.code or 0)
        raise


def run_verb() -> NoReturn:
    """Raises SystemExit. What a user can mend is one line and exit status 2."""
    try:
        build_app()()
        sys.exit(0)
    except KeyboardInterrupt:  # before typer, which has words of its own for it, is at work
        sys.exit(130)
    except TandemError as error:
        print(f"tandem: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
