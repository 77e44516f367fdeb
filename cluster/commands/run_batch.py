"""`tandem run-batch`: an OpenAI batch file through one engine in this process; several ranks are spawned."""

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.commands.options import with_service_options
from configs.errors import SettingsError
from configs.load import merge_config
from configs.options import COORDINATION, HTTP, OPTIONS
from configs.schema import ServiceSettings
from workers.errors import GroupLost

NOT_OFFLINE = frozenset(o.name for o in OPTIONS if o.group in (HTTP, COORDINATION)) | {
    "data_parallel_size",
    "lora_root",
    "lora_watch_dir",
}
without_service: Callable[[Callable[..., None]], Callable[..., None]] = partial(
    with_service_options, leave_out=NOT_OFFLINE
)


@without_service
def run_batch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or `demo`.")],
    input_file: Annotated[Path, typer.Option("-i", "--input-file", help="Lines in OpenAI's batch format.")],
    output_file: Annotated[
        Path,
        typer.Option("-o", "--output-file", help="Gets a line per finished request; what it holds is not run again."),
    ],
    *,
    flags: dict[str, Any],
) -> None:
    """Answer every line of a batch file offline.

    A run that was cut off is continued by the same command.
    """
    from cluster.models_source import resolve_settings

    settings = resolve_settings(merge_config(None, model, flags))
    try:
        failed = asyncio.run(_run(settings, input_file, output_file))
    except KeyboardInterrupt:
        print(f"tandem: interrupted; the same command continues {output_file}", file=sys.stderr)
        sys.exit(130)
    sys.exit(1 if failed else 0)


async def _run(settings: ServiceSettings, input_file: Path, output_file: Path) -> int:
    """Runs what output_file does not hold yet; the number of lines, of this run and before, not answered with 200."""
    from tqdm import tqdm

    from cluster.adapters.opening import open_desk
    from cluster.batch import read_lines, run_lines, succeeded, take_up
    from cluster.gateway.app import build_gateway_app, build_gateway_state
    from cluster.local_backend import LocalBackend
    from workers.build import offline_settings

    lines = read_lines(input_file)
    earlier = take_up(output_file)
    left = [line for line in lines if line.key not in earlier.keys]
    failed = sum(line.key in earlier.failed for line in lines)
    engine = offline_settings(settings.engine)
    adapters = await open_desk(settings, None, "")
    try:
        out = output_file.open("a", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{output_file} cannot be written: {error.strerror}", "-o") from error
    with out, tqdm(total=len(lines), initial=len(lines) - len(left), unit="request", desc="batch") as bar:
        async with LocalBackend(engine) as backend:
            app = build_gateway_app(build_gateway_state(settings, backend, adapters=adapters))
            async for row in run_lines(app, left, at_once=4 * engine.scheduler.max_num_seqs):
                if not backend.ready():
                    raise GroupLost(f"the engine stopped; the same command continues {output_file}")
                out.write(json.dumps(row, ensure_ascii=False) + "\n")
                out.flush()
                failed += not succeeded(row)
                bar.update()
    print(f"tandem: {len(left)} requests run, {len(lines) - len(left)} done before, {failed} failed", file=sys.stderr)
    return failed
