"""`tandem serve MODEL`: starts the supervisor and the launcher (cluster/service/launcher.py)."""

import sys
from typing import Annotated, Any

import typer

from tandem.cluster.cli.flags import with_service_options
from tandem.configs.load import merge_config
from tandem.configs.secrets import with_secrets


@with_service_options()
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, hub id, or `demo` (the bundled model).")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="YAML file or preset with settings; flags override it.")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Address of a Ray cluster to join. Default: a private one.")
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve MODEL over the OpenAI API until a signal arrives."""
    from tandem.cluster.deploy.model_source import resolve_settings
    from tandem.cluster.process.supervisor import split
    from tandem.cluster.service.launcher import Console, Launcher

    settings = resolve_settings(with_secrets(merge_config(config, model, flags)))
    status_pipe = split()
    try:
        status = Launcher(settings, address, Console(), status_pipe).run()
    finally:
        status_pipe.finished()
    sys.exit(status)
