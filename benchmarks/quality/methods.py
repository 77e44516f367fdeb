"""What each method of `tandem quantize` costs a trained model: KL to the dense one, perplexity, bytes, CPU time.

    python -m benchmarks.quality.methods --text FILE [--model .real-model] [--calib-tokens 2048] [--judged-tokens 2048]

All methods have the same sequences of the text to calibrate with, and the same others are judged, in float32, with the
weights that codes stand for: the figures of quantize's own report. Rows are in the file as soon as known, and a run
with the same output goes on with those that it lacks.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.machine import OtherCpu
from benchmarks.record import RESULTS, write_record
from tandem.workers.planning.hub import TEXT, Wanted
from tandem.workers.planning.model_source import find_model
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.quantize.calibration_text import Sequences, of_file
from tandem.workers.quantize.quantize_run import SourceModel, open_source, quantize
from tandem.workers.quantize.quantize_settings import QuantizeSettings

LENGTH: Final = 512
METHODS: Final[dict[str, dict[str, Any]]] = {
    "gptq": {},
    "awq": {"method": "awq"},
    "rtn": {"method": "rtn"},
    "gptq, 3 bits": {"bits": 3},
    "rtn, 3 bits": {"method": "rtn", "bits": 3},
    "awq, 3 bits": {"method": "awq", "bits": 3},
    "smoothquant": {"method": "smoothquant", "bits": 8},
    "gptq, 4.5 bits": {"bits": 4.5},
    "gptq, 8 bits": {"bits": 8},
    "rtn, zeros": {"method": "rtn", "symmetric": False},
    "gptq, zeros": {"symmetric": False},
    "awq, zeros": {"method": "awq", "symmetric": False},
}


def row_of(source: SourceModel, chosen: dict[str, Any], sequences: Sequences, threads: int) -> dict[str, Any]:
    """Quantizes into a folder that is removed, and returns figures of the report."""
    settings, started_s = QuantizeSettings(**chosen), time.process_time()
    with tempfile.TemporaryDirectory(prefix="tandem-methods-") as folder:
        platform = CpuPlatform.open(threads, 1)
        report = quantize(source, settings, Path(folder) / "out", platform, print, sequences)
    judged, scaled = report["judged"], [fold for row in report["layers"] for fold in row["folds"] if fold["scaled"]]
    found = {key: judged["against"][key] for key in ("mean_kl", "median_kl", "p99_kl", "agreement")}
    found |= {"perplexity": judged["perplexity"], "dense": judged["against"]["perplexity"], "bytes": report["bytes"]}
    if shares := [fold["protected"] for fold in scaled if "protected" in fold]:
        found["protected"] = sum(shares) / len(shares)
    return {**found, "tokens": judged["tokens"], "cpu_s": time.process_time() - started_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=".real-model")
    parser.add_argument("--text", type=Path, required=True, help="a file of text, or .jsonl with the key text")
    parser.add_argument("--calib-tokens", type=int, default=2048)
    parser.add_argument("--judged-tokens", type=int, default=2048)
    parser.add_argument("--only", nargs="*", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "quality-methods.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = find_model(options.model, None, "--model", Wanted(TEXT.patterns, weights=True))
    drawn = QuantizeSettings(calib=str(options.text), calib_tokens=options.calib_tokens + options.judged_tokens)
    found, count = of_file(drawn, folder, LENGTH).all, options.calib_tokens // LENGTH
    sequences = Sequences(found[:count], found[count : count + options.judged_tokens // LENGTH])
    source = open_source(options.model, folder)
    rows = json.loads(options.output.read_text())["rows"] if options.output.is_file() else {}
    with OtherCpu() as other:
        for name in options.only:
            if name not in rows:
                rows[name] = row_of(source, METHODS[name], sequences, options.threads)
                print(name, rows[name], flush=True)
            write_record(options.output, options, rows=rows, other_cpu=other.share)


if __name__ == "__main__":
    main()
