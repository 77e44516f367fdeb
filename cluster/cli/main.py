"""The verbs of `tandem` and the process that runs one of them.

A verb is a function in cluster/cli/verbs/ and is listed here. Modules that load slowly are imported inside the verbs.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from tandem.cluster.cli.base.flags import Command
from tandem.cluster.cli.base.terminal import GroupedHelp, say
from tandem.cluster.cli.explain.explain import explain
from tandem.cluster.cli.live import route_costs
from tandem.cluster.cli.live.drain import drain
from tandem.cluster.cli.live.top import top
from tandem.cluster.cli.quality.distill import distill
from tandem.cluster.cli.quality.eval_text import evaluate
from tandem.cluster.cli.quality.quantize import quantize
from tandem.cluster.cli.replay.replay_file import replay
from tandem.cluster.cli.shells.completion import completion
from tandem.cluster.cli.simulate.simulate import simulate
from tandem.cluster.cli.verbs import adapters, bench, tenants
from tandem.cluster.cli.verbs.chat import chat, complete
from tandem.cluster.cli.verbs.check_config import check_config
from tandem.cluster.cli.verbs.doctor import doctor
from tandem.cluster.cli.verbs.plan import plan
from tandem.cluster.cli.verbs.run_batch import run_batch
from tandem.cluster.cli.verbs.serve import serve
from tandem.cluster.cli.verbs.status import status
from tandem.cluster.cli.verbs.tune import tune
from tandem.cluster.cli.verbs.usage import usage
from tandem.configs.errors import TandemError

VERBS: Mapping[str, Command] = {
    "serve": serve,
    "run-batch": run_batch,
    "chat": chat,
    "complete": complete,
    "plan": plan,
    "eval": evaluate,
    "simulate": simulate,
    "tune": tune,
    "quantize": quantize,
    "distill": distill,
    "status": status,
    "top": top,
    "drain": drain,
    "usage": usage,
    "explain": explain,
    "replay": replay,
    "check-config": check_config,
    "doctor": doctor,
    "completion": completion,
}
GROUPS: Mapping[str, tuple[str, Mapping[str, Command]]] = {
    "bench": ("Measure a running service, or the engine in this process.", bench.VERBS),
    "adapters": ("Add, remove and pin LoRA adapters of a running service.", adapters.VERBS),
    "routes": ("Say where requests to a running service go, and why.", route_costs.VERBS),
    "tenants": ("Add, change and remove tenants of a running service.", tenants.VERBS),
}


def build_app() -> typer.Typer:
    """Builds the command line with all verbs."""
    app = typer.Typer(
        name="tandem",
        help="Serve large language models on a Ray cluster with an OpenAI-compatible API.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_global_options)
    _add_verbs(app, VERBS)
    for name, (words, verbs) in GROUPS.items():
        group = typer.Typer(no_args_is_help=True, help=words)
        _add_verbs(group, verbs)
        app.add_typer(group, name=name)
    return app


def _add_verbs(app: typer.Typer, verbs: Mapping[str, Command]) -> None:
    for name, verb in verbs.items():
        app.command(name, cls=GroupedHelp)(verb)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tandem {version('tandem-serve')}")
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options before the verb. Typer runs their callbacks."""


def main() -> NoReturn:
    """Runs the verb of sys.argv and exits. Where Ray was loaded it exits without Python's own shutdown, which Ray's C++
    threads may crash; nothing is left to shut down by then."""
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
    """Runs the verb of sys.argv; raises SystemExit. A TandemError is printed as one line, with exit status 2."""
    try:
        build_app()()
        sys.exit(0)
    except KeyboardInterrupt:  # before typer, which has words of its own for it, is at work
        sys.exit(130)
    except TandemError as error:
        say(f"error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
