"""`tandem check-config FILE [MODEL]`."""

from typing import Annotated

import typer

from configs.load import merge_config, resolved_yaml


def check_config(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A --config file of `tandem serve`.")],
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model, where the file does not name one.")
    ] = None,
) -> None:
    """Validate a --config file and print the resolved settings."""
    from cluster.models_source import resolve_settings
    from cluster.preflight import check_adapters, check_memory, check_model, choose_device

    settings = choose_device(resolve_settings(merge_config(file, model, {})))
    check_model(settings)
    check_adapters(settings)
    check_memory(settings)
    typer.echo(resolved_yaml(settings), nl=False)
