"""The console script `tandem`: one verb per file of cluster/commands. Imports nothing heavy before a verb runs."""

import sys

import typer

from cluster.commands.check_config import check_config
from cluster.commands.run_batch import run_batch
from cluster.commands.serve import serve
from cluster.commands.status import status
from configs.errors import TandemError


def build_app() -> typer.Typer:
    """All verbs."""
    app = typer.Typer(
        name="tandem",
        help="Serve large language models on a cluster: OpenAI API, tensor and pipeline parallel groups.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("serve")(serve)
    app.command("run-batch")(run_batch)
    app.command("status")(status)
    app.command("check-config")(check_config)
    return app


def main() -> None:
    """Entry point. What a user can mend is one line and exit status 2."""
    try:
        build_app()()
    except TandemError as error:
        flag = getattr(error, "flag", None)
        named = f"{flag}: " if flag and flag not in str(error) else ""
        print(f"tandem: error: {named}{error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
