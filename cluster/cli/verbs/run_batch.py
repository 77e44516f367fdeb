"""`tandem run-batch`: answers an OpenAI batch file with one engine in this process; further ranks are child
processes."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cluster.cli.base.flags import with_service_options
from tandem.cluster.cli.base.terminal import say
from tandem.configs.errors import SettingsError
from tandem.configs.load import merge_config
from tandem.configs.options import COORDINATION, LOGS, OPTIONS
from tandem.configs.schema import ServiceSettings
from tandem.workers.messages.errors import GroupLost

OF_A_SERVICE = frozenset(
    {
        "data_parallel_size",
        "lora_root",
        "lora_watch_dir",
        "host",
        "port",
        "api_server_count",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "auth",
        "api_key",
        "admin_api_key",
        "metrics_api_key",
        "metrics_prefix",
        "allowed_origins",
        "disable_fastapi_docs",
        "disable_ui",
        "enable_force_include_usage",
        "response_store_ttl",
        "response_store_bytes",
        "idempotency_ttl",
        "idempotency_bytes",
        "files_ttl",
        "max_file_bytes",
        "files_bytes",
        "max_batch_lines",
        "state_dir",
        "usage_days",
        "usage_rows",
        "shutdown_timeout",
        "kv_events",
        "redis_url",
        "redis_timeout_ms",
    }
)
"""Options about ports, keys, stores and groups, of which a batch has none. All others may change answers."""
NOT_OFFLINE = OF_A_SERVICE | {option.name for option in OPTIONS if option.group in (COORDINATION, LOGS)}


@with_service_options(leave_out=NOT_OFFLINE)
def run_batch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub id, or `demo` (the bundled model).")],
    input_file: Annotated[Path, typer.Option("-i", "--input-file", help="File in OpenAI's batch format.")],
    output_file: Annotated[
        Path,
        typer.Option("-o", "--output-file", help="File for one line per answer; those with status 200 stay in it."),
    ],
    *,
    flags: dict[str, Any],
) -> None:
    """Answer all requests of a batch file offline.

    The same command continues a run that was interrupted, and tries lines again that failed. Rows are written as
    requests end, and stand in the order of the input once all have.
    """
    from tandem.cluster.deploy.resolved_settings import resolve_settings

    settings = resolve_settings(merge_config(None, model, flags))
    for line in settings.without_effect:
        say(line)
    try:
        failed = asyncio.run(_run(settings, input_file, output_file))
    except KeyboardInterrupt:
        say(f"interrupted; the same command continues {output_file}")
        sys.exit(130)
    sys.exit(1 if failed else 0)


async def _run(settings: ServiceSettings, input_file: Path, output_file: Path) -> int:
    """Runs the lines that output_file does not answer yet. Returns how many of all lines were not answered with 200.
    SettingsError for a file that cannot be read or written, GroupLost when the engine stops."""
    from tqdm import tqdm

    from tandem.cluster.adapters.build_adapters import open_adapter_service
    from tandem.cluster.cli.batch.batch_files import in_order, lines_left, read_finished, read_lines, run_lines
    from tandem.cluster.cli.batch.local_dispatch import LocalDispatch
    from tandem.cluster.gateway.app import wiring
    from tandem.cluster.gateway.app.routes import build_gateway_app
    from tandem.workers.build import offline_settings

    lines = read_lines(input_file)
    left, failed = lines_left(lines, read_finished(output_file)), 0
    engine = offline_settings(settings.engine)
    adapters = await open_adapter_service(settings, None, "")
    try:
        out = output_file.open("ab")
    except OSError as error:
        raise SettingsError(f"{output_file} cannot be written: {error.strerror}", "-o") from error
    with out, tqdm(total=len(lines), initial=len(lines) - len(left), unit="request", desc="batch") as bar:
        async with LocalDispatch(engine) as dispatch:
            metrics = wiring.build_metrics(settings)
            text = wiring.build_text_services(settings, metrics)
            accounts = wiring.build_accounts(settings.gateway, open_port=False)
            context = wiring.build_context(settings, dispatch, accounts, metrics, adapters=adapters)
            app = build_gateway_app(text, accounts, context)
            async for row, has_succeeded in run_lines(app, left, at_once=4 * engine.scheduler.max_num_seqs):
                if not dispatch.ready():
                    raise GroupLost(f"the engine stopped; the same command continues {output_file}")
                out.write(row + b"\n")
                out.flush()
                failed += not has_succeeded
                bar.update()
    in_order(output_file, lines)
    say(f"{len(left)} requests run, {len(lines) - len(left)} done before, {failed} failed")
    return failed
