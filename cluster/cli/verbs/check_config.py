"""`tandem check-config FILE [MODEL]`: validates a settings file and prints all resolved settings."""

from typing import Annotated

import typer

from tandem.cluster.cli.base.terminal import say
from tandem.configs.autoscaling import check_policy
from tandem.configs.errors import SettingsError
from tandem.configs.load import merge_config, read_serve_file, resolved_yaml
from tandem.configs.schema import ServiceSettings


def check_config(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File for `tandem serve --config`, or for `serve run`.")],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, hub id, or `demo`, if the file names no model.")
    ] = None,
) -> None:
    """Validate a settings file and print all resolved settings."""
    if not (services := read_serve_file(file)):
        typer.echo(resolved_yaml(_checked_here(merge_config(file, model, {}))), nl=False)
        return
    if model is not None:
        raise SettingsError(f"{model}: {file} is a Ray Serve file, which names its models itself", "MODEL")
    for place, settings in enumerate(services):
        typer.echo(("---\n" if place else "") + resolved_yaml(_checked(settings)), nl=False)
    say(f"{file} is a Ray Serve file: start it with `serve run {file}`, on a cluster with `serve deploy`")


def _checked_here(settings: ServiceSettings) -> ServiceSettings:
    """Resolves and checks settings as `tandem serve` on this machine does. SettingsError."""
    from tandem.cluster.deploy.preflight import check_memory, check_processes, choose_device

    check_policy(settings.autoscaling_config)
    settings = _checked(choose_device(settings))
    check_processes(settings)
    check_memory(settings)
    return settings


def _checked(settings: ServiceSettings) -> ServiceSettings:
    """Resolves settings and checks the model and the adapters, without the machine's devices and memory.
    SettingsError."""
    from tandem.cluster.deploy.preflight import check_adapters, check_model
    from tandem.cluster.deploy.resolved_settings import resolve_settings
    from tandem.cluster.gateway.app.model_text import check_text
    from tandem.workers.planning.start_notes import model_notes

    settings = resolve_settings(settings)
    spec = check_model(settings)
    for note in (*settings.without_effect, *model_notes(settings.engine, spec), *check_text(settings)):
        say(note)
    check_adapters(settings)
    return settings
