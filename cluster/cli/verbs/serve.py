"""`tandem serve MODEL`: starts the supervisor and the launcher (cluster/service/launcher.py)."""

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cluster.cli.base.flags import with_service_options
from tandem.cluster.cli.base.terminal import say
from tandem.configs.errors import SettingsError, TandemError
from tandem.configs.load import merge_config
from tandem.configs.schema import LogSettings
from tandem.configs.secrets import with_secrets

if TYPE_CHECKING:
    from tandem.cluster.logs.log_files import LogPlace

log = logging.getLogger("tandem.launcher")


@with_service_options()
def serve(
    ctx: typer.Context,
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
    from tandem.cluster.deploy.resolved_settings import pin_settings
    from tandem.cluster.process.supervisor import split
    from tandem.cluster.service.launcher import Console, Launcher

    command: Any = ctx.command
    if read := command.variables.in_use():
        say(f"from the environment: {', '.join(read)}")
    if allow_unauthenticated_ray and address is None:
        raise SettingsError("needs --address: a private Ray always asks for a token", "--allow-unauthenticated-ray")
    settings = pin_settings(with_secrets(merge_config(config, model, flags)))
    logs = open_log_of_run(settings.logs)
    status_pipe = split()
    try:
        status = Launcher(settings, address, Console(), status_pipe, allow_unauthenticated_ray, logs).run()
    except TandemError as error:
        log.error("%s", error)
        raise
    except Exception:
        log.exception("the launcher failed")
        raise
    finally:
        status_pipe.finished()
    sys.exit(status)


def open_log_of_run(settings: LogSettings) -> "LogPlace | None":
    """Opens the log file of this process, and of those that it forks; returns the place for all files of the run, None
    where the default one cannot be written. SettingsError when --log-dir cannot be."""
    from tandem.cluster.logs.log_files import LogPlace, open_log, run_name

    place = LogPlace(level=settings.level, base=settings.dir, run=run_name(), form=settings.format)
    try:
        open_log(place.folder(""), "launcher", settings.level, settings.format)
    except OSError as error:
        if settings.dir is not None:
            raise SettingsError(f"{settings.dir} cannot be written: {error.strerror}", "--log-dir") from error
        say(f"there are no log files: {place.folder('')} cannot be written ({error.strerror}); --log-dir names another")
        return None
    return place
