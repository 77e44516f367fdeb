"""`tandem distill METHOD TARGET`: makes a draft model, an EAGLE-3 head or Medusa heads of a model's own answers.

The work is workers/distill/; this module reads flags and prints the report.
"""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cluster.cli.base.terminal import say, table
from tandem.cluster.cli.quality.run_flags import (
    WEIGHTS,
    AsJson,
    CpuThreads,
    Revision,
    check_threads,
    model_argument,
    own_flag,
)
from tandem.workers.planning.model_source import find_model


def distill(
    method: Annotated[
        str, typer.Argument(metavar="METHOD", help="draft (a small Llama), eagle (an EAGLE-3 head) or medusa.")
    ],
    target: Annotated[str, model_argument("TARGET")],
    prompts: Annotated[
        Path,
        own_flag("--prompts", "FILE", "A prompt a line; .jsonl: `prompt`, text to continue, or `messages`."),
    ],
    out: Annotated[Path, own_flag("--out", "DIR", "Folder for the draft or head, new or empty.")],
    minutes: Annotated[float, own_flag("--minutes", "X", "For answers and training together. Default: 10.")] = 10.0,
    steps: Annotated[
        int | None, own_flag("--steps", "N", "Steps of training. Default: as many as the minutes leave time for.")
    ] = None,
    layers: Annotated[int, own_flag("--layers", "N", "draft: its layers; medusa: a head's. Default: 1.")] = 1,
    hidden: Annotated[
        int | None, own_flag("--hidden", "N", "draft: its hidden size. Default: an eighth of TARGET's.")
    ] = None,
    heads: Annotated[
        int | None, own_flag("--heads", "N", "draft: its heads. Default: as many of TARGET's size as fit.")
    ] = None,
    draft_vocab: Annotated[
        int | None,
        own_flag("--draft-vocab", "N", "eagle: tokens that it knows, TARGET's most frequent. Default: 32000, or all."),
    ] = None,
    places: Annotated[
        int,
        own_flag("--num-speculative-tokens", "N", "Guesses that the report tells of; medusa: its heads. Default: 4."),
    ] = 4,
    answers: Annotated[int, own_flag("--answers", "N", "Answers to each prompt, at most. Default: 8.")] = 8,
    max_tokens: Annotated[int, own_flag("--max-tokens", "N", "Tokens of an answer, at most. Default: 256.")] = 256,
    learning_rate: Annotated[
        float | None,
        own_flag("--learning-rate", "X", "The highest. Default: draft 0.003, others 0.001; less where they are wide."),
    ] = None,
    seed: Annotated[int, own_flag("--seed", "N", "Of answers, of the order, and of new weights. Default: 0.")] = 0,
    revision: Revision = None,
    cpu_threads: CpuThreads = None,
    as_json: AsJson = False,
) -> None:
    """Make a draft or a head that guesses a model's tokens.

    It learns from the model's own answers. TARGET answers the prompts at temperatures 0.7 and 1, for at most half of
    the minutes; then the student learns its distributions. A tenth of the prompts judges: distill_report.json says how
    many guesses are kept, place by place, greedily and under the sampling of `tandem serve`, before and after, and what
    that would save here. What is written vLLM reads as well. The same command goes on with a run that was ended.
    """
    from tandem.workers.distill.distill_run import DistillTarget
    from tandem.workers.distill.distill_run import distill as run
    from tandem.workers.distill.distill_settings import DistillSettings

    check_threads(cpu_threads)
    settings = DistillSettings(
        method=method,
        minutes=minutes,
        steps=steps,
        layers=layers,
        hidden=hidden,
        heads=heads,
        draft_vocab=draft_vocab,
        places=places,
        answers=answers,
        max_tokens=max_tokens,
        learning_rate=learning_rate,
        seed=seed,
    ).checked()
    flags = {name: value for name, value in (("revision", revision), ("cpu_threads", cpu_threads)) if value is not None}
    found = DistillTarget(target, find_model(target, revision, "TARGET", WEIGHTS), flags)
    try:
        report = run(found, settings, prompts.expanduser(), out.expanduser(), say)
    except KeyboardInterrupt:
        say("interrupted: the same command goes on where it was")
        raise
    typer.echo(json.dumps(report, indent=1) if as_json else "\n".join(_lines(report, out)))


def _lines(report: dict[str, Any], out: Path) -> list[str]:
    """The table of acceptance, and what it is worth."""
    cells = [["temperature", "guesses kept by place, before", "after", "bound", "tokens a step", "gain", "guesses"]]
    for before, after in zip(report["before"], report["after"], strict=True):
        cells.append(
            [
                f"{after['temperature']:g}",
                _shares(before["acceptance_by_place"]),
                _shares(after["acceptance_by_place"]),
                "-" if after["rejection_bound"] is None else f"{after['rejection_bound']:.2f}",
                f"{after['tokens_per_step']:.2f}",
                f"{after['predicted_gain']:.2f}",
                str(after["best_guesses"]),
            ]
        )
    seconds = report["step_seconds"]
    steps = " ".join(f"{1000 * one:.2f}" for one in seconds["target"])
    guess = f"{1000 * seconds['guess']:.2f} ms" + (" for all" if seconds["guesses_at_once"] else "")
    return [
        *table(cells),
        f"answers     {report['answers']:,}, {report['answer_tokens']:,} tokens, {report['answer_seconds']:.0f} s",
        f"training    {report['training_steps']:,} steps, {report['training_seconds']:.0f} s, "
        f"{report['parameters']:,} parameters",
        f"gain        predicted, for one sequence: TARGET's step takes {steps} ms for 1, 2.. tokens, a guess {guess}",
        f"written to  {out}",
        f"to serve    tandem serve {_serving(report, out)}",
    ]


def _serving(report: dict[str, Any], out: Path) -> str:
    """The arguments that serve the target with what was made."""
    from tandem.workers.distill.distill_settings import SERVED_AS

    settings = report["settings"]
    method, places = SERVED_AS[settings["method"]], settings["places"]
    config = json.dumps({"method": method, "model": str(out), "num_speculative_tokens": places})
    return f"{shlex.quote(report['target'])} --speculative-config {shlex.quote(config)}"


def _shares(places: list[float]) -> str:
    return " ".join(f"{one:.2f}" for one in places)
