"""What each form of weights and of KV costs: perplexity, and KL to the dense model in float32, on one text.

    python -m benchmarks.quality.forms --text FILE [--model .real-model] [--tokens 4096] [--folders FOLDER ...]

A model that is quantized as stored, as that of `make real-model`, is undone first (dense_copy.py). Its weights lie on a
grid, of 4 bits in groups of 32 there, so that forms with those groups would look better than they are.
--folders: checkpoints of the same model, such as `tandem quantize` writes. Rows are in the file as soon as known.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import OtherCpu
from benchmarks.quality.dense_copy import dense_copy
from benchmarks.record import RESULTS, write_record
from tandem.parallel.quantization.weight_plan import AT_LOAD
from tandem.workers.evaluation.evaluate import judge, keep, sample_of
from tandem.workers.evaluation.judgement import verdict_of
from tandem.workers.offline.inputs import settings_of
from tandem.workers.planning.resolve import read_spec

KV = ("int8", "fp8")


def variants(options: argparse.Namespace, dense: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Returns a model and flags by name."""
    bf16 = {"dtype": "bfloat16"}
    found = {"bf16": (dense, bf16)}
    found |= {name: (dense, {**bf16, "quantization": name}) for name in AT_LOAD}
    found |= {f"KV {name}": (dense, {**bf16, "kv_cache_dtype": name}) for name in KV}
    if dense != options.model:
        found["as stored"] = (options.model, bf16)
    found |= {Path(folder).name: (folder, bf16) for folder in options.folders}
    return {name: one for name, one in found.items() if not options.only or name in options.only}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".real-model")
    parser.add_argument("--text", type=Path, required=True, help="a file of text, or .jsonl with the key text")
    parser.add_argument("--tokens", type=int, default=4096, help="to score")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--folders", nargs="*", default=[], help="checkpoints of the same model")
    parser.add_argument("--only", nargs="*", default=[], help="names of forms; default: all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "quality.json")
    options = parser.parse_args()

    def settings(model: str, flags: dict[str, Any]) -> Any:
        return settings_of(model, {"cpu_threads": options.threads, **flags})[0]

    dense = options.model
    if read_spec(settings(dense, {})).weights.method is not None:
        dense = str(dense_copy(dense, RESULTS.parent / "models" / f"{Path(dense).name.strip('.')}-dense"))
    reference = settings(dense, {"dtype": "float32"})
    sample = sample_of(reference, options.text, window=options.window, tokens=options.tokens)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-eval-") as folder, OtherCpu() as other:
        kept = keep(reference, sample, Path(folder))
        for name, (model, flags) in variants(options, dense).items():
            verdict = verdict_of(judge(settings(model, flags), sample, Path(folder), kept), sample.num_bytes)
            rows[name] = asdict(verdict)
            write_record(options.output, options, scored=sample.num_scored, rows=rows)
            beside = verdict.against
            assert beside is not None
            print(
                f"{name}: perplexity {verdict.perplexity:.3f} ({beside.perplexity:.3f}), KL {beside.mean_kl:.3g}, "
                f"99 % {beside.p99_kl:.3g}, same choice {beside.agreement:.2%}",
                flush=True,
            )
    write_record(options.output, options, scored=sample.num_scored, rows=rows, other_cpu=other.share)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
