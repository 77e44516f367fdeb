"""`tandem eval MODEL --perplexity FILE`: how well a model predicts a text, and how far it is from another one.

workers/evaluation/ computes it, in this process, with the engine that serves. This module reads flags and prints.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from tandem.cluster.cli.base.flag_groups import setting, with_group
from tandem.cluster.cli.base.flags import with_service_options
from tandem.configs.environment import PREFIX
from tandem.configs.errors import SettingsError
from tandem.configs.options import OPTIONS

if TYPE_CHECKING:
    from tandem.configs.schema import EngineSettings

JUDGED = {
    "tokenizer", "revision", "tokenizer_revision", "dtype", "quantization", "batch_invariant", "enforce_eager",
    "max_model_len", "load_format", "hf_overrides", "tensor_parallel_size", "pipeline_parallel_size",
    "enable_expert_parallel", "kv_cache_dtype", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "num_gpu_blocks_override", "block_size", "max_num_batched_tokens", "device", "cpu_threads", "cpu_offload_gb",
}  # fmt: skip
DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class EvalFlags:
    """The text, the reference, and what is shown."""

    perplexity: str | None = setting(
        "File of text, in UTF-8: one text, or of a .jsonl file one a line, its key `text`. Needed."
    )
    against: str | None = setting(
        "A reference for KL and agreement: dense, the same model without --quantization and --kv-cache-dtype, or a "
        "folder or hub id with the same vocabulary."
    )
    tokens: int | None = setting("Tokens to score, the file's first ones.", shown="all", least=1)
    window: int | None = setting(
        "Most tokens of a text that are computed together.", shown="2048 or the context", least=2
    )
    stride: int | None = setting(
        "Tokens that each window scores behind a text's first one; the others are what it has before them.",
        shown="one less than --window",
        least=1,
    )
    worst: int = setting("Tokens to show, those that were predicted worst.", default=20, least=0, most=100_000)
    output_json: str | None = setting("File for one JSON object of all figures, those of each token too.")


@with_group("judged", EvalFlags, "Evaluation", f"{PREFIX}EVAL_")
@with_service_options(leave_out=frozenset(option.name for option in OPTIONS) - JUDGED)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, hub id, or `demo` (the bundled model).")],
    judged: EvalFlags,
    *,
    flags: dict[str, Any],
) -> None:
    """Judge MODEL on a text: perplexity, distance to a reference.

    KL is of the reference to MODEL, in nats for each token of the text, over the whole vocabulary. The reference is
    computed first; its probabilities lie on the disk of TMPDIR meanwhile, 4 bytes for each entry of the vocabulary and
    token.
    """
    if judged.perplexity is None:
        raise SettingsError("a file of text is needed", "--perplexity")
    file, output = Path(judged.perplexity).expanduser(), _output(judged.output_json)
    began_s = perf_counter()
    from tandem.workers.evaluation.evaluate import judge, keep, sample_of
    from tandem.workers.evaluation.judgement import verdict_of
    from tandem.workers.evaluation.verdict_report import as_json, report
    from tandem.workers.offline.inputs import settings_of

    settings, _ = settings_of(model, flags)
    other = None if judged.against is None else _reference(model, judged.against, settings, flags)
    sample = sample_of(settings, file, window=judged.window, stride=judged.stride, tokens=judged.tokens)
    with tempfile.TemporaryDirectory(prefix="tandem-eval-") as folder:
        kept = None if other is None else keep(other, sample, Path(folder))
        scores = judge(settings, sample, Path(folder), kept)
    verdict = verdict_of(scores, sample.num_bytes)
    typer.echo("\n".join(report(verdict, scores, sample, judged.against, judged.worst)))
    if output is not None:
        given = {name: value for name, value in flags.items() if value is not None}
        about = {"model": model, "file": str(file), "reference": judged.against, "flags": given}
        found = {**about, "seconds": perf_counter() - began_s, **as_json(verdict, scores, sample, judged.worst)}
        output.write_text(json.dumps(found), encoding="utf-8")


def _output(given: str | None) -> Path | None:
    """Returns the file for the figures, made now: an hour later would be late for an error."""
    if given is None:
        return None
    path = Path(given).expanduser()
    try:
        path.touch()
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}", "--output-json") from error
    return path


def _reference(model: str, against: str, settings: "EngineSettings", flags: Mapping[str, Any]) -> "EngineSettings":
    """Returns the settings of what the model is compared with: computed with the same flags, but with weights and KV
    that no flag rounds. SettingsError where that would be the same again."""
    from tandem.workers.offline.inputs import settings_of
    from tandem.workers.planning.resolve import read_spec

    plain = {name: value for name, value in flags.items() if name not in ("quantization", "kv_cache_dtype")}
    if against != DENSE:
        own = ("revision", "tokenizer", "tokenizer_revision", "load_format", "hf_overrides")
        try:
            return settings_of(against, {name: value for name, value in plain.items() if name not in own})[0]
        except SettingsError as error:
            error.flag = "--against" if error.flag == "MODEL" else error.flag
            raise
    dense = replace(
        settings,
        model=replace(settings.model, quantization=None),
        cache=replace(settings.cache, kv_cache_dtype="auto"),
    )
    plan = read_spec(dense).weights
    if plan.method is not None:
        words = f"dense: {model} holds weights that {plan.method} has quantized, and not what they were"
        raise SettingsError(f"{words} made of: name that model's folder, --against FOLDER", "--against")
    if dense == settings:
        words = "dense: neither --quantization nor --kv-cache-dtype is given, so that it would be compared with itself"
        raise SettingsError(words, "--against")
    return dense
