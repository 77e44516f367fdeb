"""`tandem check-config FILE [MODEL]`."""

from typing import Annotated

import typer

from configs.errors import SettingsError
from configs.load import merge_config, read_serve_file, resolved_yaml
from configs.schema import ServiceSettings


def check_config(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A --config file of `tandem serve`, or a file of `serve run`.")
    ],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, where the file does not name one.")
    ] = None,
) -> None:
    """Validate a settings file and print all settings."""
    if not (services := read_serve_file(file)):
        typer.echo(resolved_yaml(_checked_here(merge_config(file, model, {}))), nl=False)
        return
    if model is not None:
        raise SettingsError(f"{model}: {file} is a Ray Serve file, which names its models itself", "MODEL")
    for place, settings in enumerate(services):
        typer.echo(("---\n" if place else "") + resolved_yaml(_checked(settings)), nl=False)
    typer.echo(f"tandem: {file} is a Ray Serve file: start it with `serve run {file}`", err=True)


def _checked_here(settings: ServiceSettings) -> ServiceSettings:
    """As `tandem serve` on this machine would take them."""
    from cluster.preflight import check_memory, check_processes, choose_device

    settings = choose_device(settings)
    settings = _checked(settings)
    check_processes(settings)
    check_memory(settings)
    return settings


def _checked(settings: ServiceSettings) -> ServiceSettings:
    """Resolved, with a model and adapters that can be served; on which machines is not asked."""
    from cluster.models_source import resolve_settings
    from cluster.preflight import check_adapters, check_model

    settings = resolve_settings(settings)
    check_model(settings)
    check_adapters(settings)
    return settings
