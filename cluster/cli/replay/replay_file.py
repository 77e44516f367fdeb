"""`tandem replay FILE`: a group's recorded steps again; each plan is compared."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from tandem.cluster.cli.base.terminal import say

EQUAL, DIFFERENT = 0, 1


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A recording: a file that ends with .recording.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="FOLDER", help="Compute the plans too, with this model, and compare the token ids."
        ),
    ] = None,
) -> None:
    """Replay a group's recorded steps and compare the plans.

    The real scheduler runs on the recorded requests, clock and answers of the ranks; nothing is computed without
    --model. Exit status 0: all plans are equal; 1: the first difference is printed; 2: it cannot be replayed.
    """
    from tqdm import tqdm

    from tandem.workers.engine.recording.recording_file import RecordingError, read_recording
    from tandem.workers.engine.recording.replay import replay as run

    recording = read_recording(file)
    header = recording.header
    if not any(call.plans for call in recording.calls):
        raise RecordingError(f"{file} has no step: there is nothing to compare")
    _say_version(header.product)
    calls = tqdm(recording.calls, unit=" calls", disable=None, leave=False)  # none where nobody looks at a terminal
    if model is None:
        report, computed = run(recording.state, calls), ""
    else:
        from tandem.cluster.cli.replay.ranks_beside import RanksBeside

        with RanksBeside(recording, model) as ranks:
            report = run(recording.state, calls, ranks)
            computed = f", {ranks.num_tokens} token ids equal"
    begin = "the beginning of its life" if header.is_whole else "a state in the middle of its life"
    say(f"group {header.group}, {header.mode}, from {begin}: {len(recording.calls)} calls")
    if report.difference is None:
        typer.echo(f"{report.num_steps} steps, all plans equal{computed}")
        sys.exit(EQUAL)
    typer.echo(f"{report.num_steps} steps equal, then {report.difference}")
    sys.exit(DIFFERENT)


def _say_version(wrote: str) -> None:
    """Says that another version wrote the recording, if one did: it may have planned otherwise."""
    if wrote != (here := version("tandem-serve")):
        say(f"written by Tandem {wrote}, replayed by {here}, which may plan otherwise")
