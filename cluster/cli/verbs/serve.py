"""`tandem serve MODEL`: starts the supervisor and the launcher (cluster/service/launcher.py)."""

import sys
from typing import Annotated, Any

import typer

from tandem.cluster.cli.base.flags import with_service_options
from tandem.configs.errors import SettingsError
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
    allow_unauthenticated_ray: Annotated[
        bool,
        typer.Option(
            "--allow-unauthenticated-ray",
            help="Join a Ray at --address that asks for no token: all who reach its ports can run code in it.",
        ),
    ] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve MODEL over the OpenAI API until a signal arrives."""
    from tandem.cluster.deploy.resolved_settings import resolve_settings
    from tandem.cluster.process.supervisor import split
    from tandem.cluster.service.launcher import Console, Launcher

    if allow_unauthenticated_ray and address is None:
        raise SettingsError("needs --address: a private Ray always asks for a token", "--allow-unauthenticated-ray")
    settings = resolve_settings(with_secrets(merge_config(config, model, flags)))
    status_pipe = split()
    try:
        status = Launcher(settings, address, Console(), status_pipe, allow_unauthenticated_ray).run()
    finally:
        status_pipe.finished()
    sys.exit(status)
