"""`tandem serve MODEL`."""

import sys
from typing import Annotated, Any

import typer

from cluster.commands.options import with_service_options
from configs.load import merge_config


@with_service_options
def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A folder, a hub id, or `demo` (the bundled model).")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="YAML file of settings; flags win.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Join the Ray cluster at this address. Default: a private Ray.")
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Serve MODEL over the OpenAI API until a signal arrives."""
    from cluster.launcher import Launcher, Say
    from cluster.models_source import resolve_settings
    from cluster.supervisor import split

    settings = resolve_settings(merge_config(config, model, flags))
    told = split()
    try:
        status = Launcher(settings, address, Say(), told).run()
    finally:
        told.over()
    sys.exit(status)
