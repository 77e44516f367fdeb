"""`tandem quantize MODEL`: rounds a model's weights to a few bits, and writes it as a checkpoint that servers read.

The work is workers/quantize/; this module reads flags and prints the report.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from tandem.configs.errors import SettingsError
from tandem.workers.planning.model_source import find_model

if TYPE_CHECKING:
    from tandem.workers.quantize.quantize_settings import QuantizeSettings


def quantize(
    model: Annotated[str, model_argument("MODEL")],
    output: Annotated[Path, own_flag("--output", "DIR", "Folder for the quantized model, new or empty.")],
    method: Annotated[
        str, own_flag("--method", "NAME", "rtn (nearest), gptq, awq or smoothquant (int8 inputs too). Default: gptq.")
    ] = "gptq",
    bits: Annotated[
        float | None,
        own_flag(
            "--bits", "X", "2, 3, 4 or 8 of a weight, or an average from 4 to 8 (4.5). Default: 4; smoothquant: 8."
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        own_flag(
            "--group-size", "N", "Inputs that share a scale; -1: all of an output. Default: 128; smoothquant: -1."
        ),
    ] = None,
    symmetric: Annotated[
        bool | None, typer.Option("--sym/--asym", help="Without zeros, or with. Default: --sym.", show_default=False)
    ] = None,
    act_order: Annotated[
        bool | None,
        typer.Option(
            "--act-order/--no-act-order",
            help="gptq: inputs with the largest values are rounded first, or in their order. Default: --act-order.",
            show_default=False,
        ),
    ] = None,
    calib: Annotated[
        str,
        own_flag(
            "--calib", "FILE|own", "Text to calibrate with: .txt, or .jsonl with `text`; own: the model writes it."
        ),
    ] = "own",
    calib_tokens: Annotated[int, own_flag("--calib-tokens", "N", "Tokens to calibrate with. Default: 16384.")] = 16384,
    calib_length: Annotated[
        int | None, own_flag("--calib-length", "N", "Tokens of a sequence. Default: 512, or the model's context.")
    ] = None,
    alpha: Annotated[
        float | None, own_flag("--alpha", "X", "smoothquant: how much of the range moves from inputs. Default: 0.5.")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        own_flag("--ignore", "NAME", "A layer that stays as it is, or re:EXPRESSION; may be given several times."),
    ] = None,
    quantize_head: Annotated[
        bool,
        typer.Option("--quantize-head", help="The head (lm_head) too, in the same form; refused where it is tied."),
    ] = False,
    seed: Annotated[
        int, own_flag("--seed", "N", "Of the choice of text, and of what the model writes. Default: 0.")
    ] = 0,
    revision: Revision = None,
    cpu_threads: CpuThreads = None,
    as_json: AsJson = False,
) -> None:
    """Round MODEL's weights to a few bits and write them.

    The checkpoint is one of compressed-tensors, which `tandem serve DIR`, vLLM and transformers load. Works layer by
    layer on the CPU: memory has one layer and its activations at a time. Beside the weights lies quantize_report.json,
    with the error of each layer, and perplexity and KL against MODEL on text that it was not calibrated with. The same
    command goes on with a run that was ended.
    """
    check_threads(cpu_threads)
    text = {"calib": calib, "calib_tokens": calib_tokens, "length": calib_length, "seed": seed, "head": quantize_head}
    settings = _settings(method, bits, group_size, symmetric, act_order, alpha, ignore=tuple(ignore or ()), **text)
    report = _run(model, revision, settings, output, cpu_threads)
    typer.echo(json.dumps(report, indent=1) if as_json else "\n".join(_lines(report, output)))


def _settings(
    method: str,
    bits: float | None,
    group_size: int | None,
    symmetric: bool | None,
    act_order: bool | None,
    alpha: float | None,
    **others: Any,
) -> "QuantizeSettings":
    """Returns the settings of flags, None for those that are not given. SettingsError for a flag that the method does
    not read, too."""
    from tandem.workers.quantize.quantize_settings import QuantizeSettings

    is_smooth = method == "smoothquant"
    if alpha is not None and not is_smooth:
        raise SettingsError(f"--method {method} has none; smoothquant does", "--alpha")
    if is_smooth and (group_size not in (None, -1) or symmetric is False):
        flag = "--asym" if symmetric is False else "--group-size"
        raise SettingsError("smoothquant has one scale for each output, without zeros", flag)
    if act_order is not None and method != "gptq":
        flag = "--act-order" if act_order else "--no-act-order"
        raise SettingsError(f"--method {method} rounds inputs in no order; gptq does", flag)
    return QuantizeSettings(
        method=method,
        bits=bits if bits is not None else 8 if is_smooth else 4,
        group_size={None: 128, -1: None}.get(group_size, group_size),
        symmetric=symmetric is not False,
        act_order=act_order is not False,
        alpha=0.5 if alpha is None else alpha,
        **others,
    ).checked()


def _run(
    model: str, revision: str | None, settings: "QuantizeSettings", output: Path, cpu_threads: int | None
) -> dict[str, Any]:
    from tandem.workers.platforms.cpu import CpuPlatform
    from tandem.workers.quantize.freed_memory import free_at_once
    from tandem.workers.quantize.quantize_run import open_source, quantize

    free_at_once()
    source = open_source(model, find_model(model, revision, "MODEL", WEIGHTS))
    try:
        return quantize(source, settings, output.expanduser(), CpuPlatform.open(cpu_threads, 1), say)
    except KeyboardInterrupt:
        say("interrupted: the same command goes on where it was")
        raise


def _lines(report: dict[str, Any], output: Path) -> list[str]:
    """The table of layers, and what became of the model."""
    cells = [["layer", "bits", "error", "worst", "hidden states", "seconds"]]
    few, without = [], []
    for row in report["layers"]:
        linears = row["linears"] or [
            {"layers": ["-"], "error": 0.0, "bits": "-", "few_tokens": False, "no_inverse": False}
        ]
        worst = max(linears, key=lambda one: one["error"])
        bits = "/".join(dict.fromkeys(str(one["bits"]) for one in linears))
        few += [module for one in linears if one["few_tokens"] for module in one["layers"]]
        without += [module for one in linears if one["no_inverse"] for module in one["layers"]]
        error, drift = f"{worst['error']:.4f}", f"{row['drift']:.4f}"
        leaf = worst["layers"][0].rpartition(".")[2]
        cells.append([str(row["layer"]), bits, error, leaf, drift, f"{row['seconds']:.1f}"])
    judged, against = report["judged"], report["judged"]["against"]
    saved = report["bytes"] / report["source_bytes"]
    return [
        *table(cells),
        *([f"head        error {head['error']:.4f}, {head['bits']} bits"] if (head := report.get("head")) else []),
        *_fold_lines(report),
        *_nearest_lines("too few tokens passed them", few),
        *_nearest_lines("sums over their inputs have no inverse", without),
        f"perplexity  {judged['perplexity']:.4f}, of the model before {against['perplexity']:.4f}",
        f"KL          {against['mean_kl']:.5f} nats a token, the same first choice at {against['agreement']:.1%}, "
        f"over {judged['tokens']} tokens",
        f"bytes       {report['bytes']:,}, {saved:.2f} of {report['source_bytes']:,}",
        f"seconds     {report['seconds']:.0f}",
        f"written to  {output}; tandem serve {output}",
    ]


def _nearest_lines(why: str, modules: list[str]) -> list[str]:
    """A line about layers that gptq has not rounded."""
    return [f"rounded to nearest, as {why}: {len(modules)}, such as {modules[0]}"] if modules else []


def _fold_lines(report: dict[str, Any]) -> list[str]:
    """Lines about scales of inputs."""
    folds = [fold for row in report["layers"] for fold in row["folds"]]
    scaled = [fold for fold in folds if fold["scaled"]]
    unscaled = sorted({module.rpartition(".")[2] for fold in folds if not fold["scaled"] for module in fold["layers"]})
    lines = []
    if shares := [fold["protected"] for fold in scaled if "protected" in fold]:
        gain = sum(fold["gain"] for fold in scaled) / len(scaled)
        lines.append(
            f"awq: {sum(shares) / len(shares):.0%} of the salient inputs (1 % of all, those with the largest values) "
            f"are protected; errors with scales are {gain:.2f} of those without"
        )
    if unscaled:
        lines.append(f"without scales, as nothing is there to fold them into: {', '.join(unscaled)}")
    return lines
