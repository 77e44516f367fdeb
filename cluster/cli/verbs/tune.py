"""`tandem tune MODEL`: measures the tiles of a model's kernels on the GPU that is here, and keeps them for its starts.

What is measured, and where it is kept: workers/tuning/. A start measures too, for some seconds; this takes its time.
"""

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import asdict, replace

from tandem.cluster.cli.base.flags import with_service_options
from tandem.cluster.cli.base.terminal import say, table
from tandem.configs.errors import SettingsError
from tandem.configs.load import build_settings
from tandem.configs.options import OPTIONS
from tandem.configs.schema import EngineSettings
from tandem.workers.planning.hub import Wanted
from tandem.workers.planning.model_source import find_model

if TYPE_CHECKING:
    from tandem.workers.tuning.trials import Trials
    from tandem.workers.tuning.tuned_start import TunedModel, Tuner

TUNED = {
    "revision", "dtype", "hf_overrides", "tensor_parallel_size", "enable_expert_parallel", "kv_cache_dtype",
    "block_size", "device",
}  # fmt: skip


@with_service_options(leave_out=frozenset(option.name for option in OPTIONS) - TUNED)
def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub id, or `demo` (the bundled model).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; progress goes to stderr.")] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Measure tiles of MODEL's kernels on this GPU.

    Starts of models with the same sizes and types, on the same kind of GPU with the same versions, compute with what is
    fastest. Needs config.json alone; takes some minutes, for what Triton has to compile. With -tp the sizes are those
    of one rank. The exit status is 1 when a kernel could not be timed.
    """
    settings = build_settings(model, flags)
    for line in settings.without_effect:
        say(line)
    folder = find_model(model, settings.engine.model.revision, "MODEL", Wanted(("config.json",)))
    engine = replace(settings.engine, model=replace(settings.engine.model, model=str(folder)))
    tuner, tuned = _opened(engine)
    trials = _measured(tuner, tuned)
    if as_json:
        typer.echo(json.dumps({"device": asdict(tuner.device), "uses": _rows(trials)}, indent=1))
    else:
        typer.echo("\n".join(report(_rows(trials))))
    sys.exit(0 if all(row["default"] is not None for row in _rows(trials).values()) else 1)


def _opened(settings: EngineSettings) -> "tuple[Tuner, TunedModel]":
    """SettingsError where there is nothing to measure on, or with."""
    from tandem.parallel.context import ParallelContext
    from tandem.parallel.mesh import Mesh
    from tandem.workers.platforms.open_platform import open_platform
    from tandem.workers.rank.loading import model_to_tune

    platform = open_platform(settings, rank=0, ranks_on_node=1)
    if not platform.tunes:
        raise SettingsError("there is no GPU here whose kernels could be measured", "--device")
    parallel = settings.parallel
    mesh = Mesh(parallel.tensor_parallel_size, expert_parallel=parallel.enable_expert_parallel)
    model, tuner = model_to_tune(settings, ParallelContext(mesh), platform), platform.tuner()
    if tuner is None:
        raise SettingsError(f"there are no kernels here to measure: {platform.obstacle(model.dtype)}", "--device")
    return tuner, model


def _measured(tuner: "Tuner", model: "TunedModel") -> "Trials":
    """Measures all candidates; keeps what there is of each use once it is complete."""
    from tandem.workers.kernels.triton.tiles import words
    from tandem.workers.tuning.trials import Trials
    from tandem.workers.tuning.tuned_start import measure
    from tandem.workers.tuning.tuning_file import add_trials

    tunables = tuner.tunables(model)
    if not tunables:
        raise SettingsError("none of this model's kernels has tiles to choose from", "MODEL")
    found: Trials = {}
    say(f"{tuner.device.gpu}: {sum(len(one.candidates) for one in tunables)} tiles for {len(tunables)} uses of kernels")
    for place, tunable in enumerate(tunables):
        use = words(tunable.use)
        say(f"{place + 1} of {len(tunables)}: {use}, {len(tunable.candidates)} tiles")
        found[use] = tuple(trial for _, trial in measure(tuner, [tunable]))
        path = add_trials(tuner.device, {use: found[use]})
    if path is not None:
        say(f"kept in {path}")
    return found


def _rows(trials: "Trials") -> dict[str, dict[str, Any]]:
    """Returns by use the default and the tile that is chosen, with their microseconds by load, and what failed."""
    from tandem.workers.tuning.trials import best_of

    rows = {}
    for use, own in trials.items():
        best = best_of(own)
        rows[use] = {
            "default": None if best is None else asdict(own[0]),
            "chosen": None if best is None else asdict(best),
            "tried": len(own),
            "failed": {" ".join(map(str, trial.tile)): trial.why for trial in own if trial.why},
        }
    return rows


def report(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    """The table of before and after, and what failed."""
    cells = [["kernel", "load", "default, us", "chosen, us", "saved", "tile"]]
    lines = []
    for use, row in rows.items():
        for number, (load, before) in enumerate((row["default"] or {"us": {}})["us"].items()):
            after, tile = row["chosen"]["us"][load], " ".join(map(str, row["chosen"]["tile"]))
            tile = "the default" if row["chosen"] == row["default"] else tile
            saved = f"{1 - after / before:.0%}"
            cells.append(["" if number else use, load, f"{before:.1f}", f"{after:.1f}", saved, "" if number else tile])
        for tile, why in row["failed"].items():
            lines.append(f"{use}: {tile} failed: {why}")
    return [*table(cells, num_names=2), *lines]
