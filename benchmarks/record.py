"""The JSON records of benchmarks, one file a run under out/benchmarks, and lines for tools/gpu_run.py.

Each has the run's options and the version of torch beside its figures.
"""

import argparse
import json
import os
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parents[1] / "out" / "benchmarks"
AS_LINES = "TANDEM_TEST_JSON_LINES"
"""The variable with which note() prints: whoever set it reads a figure as soon as there is one."""


def note(**figures: object) -> None:
    """Prints figures as a JSON line where a run of several benchmarks wants it."""
    if os.environ.get(AS_LINES):
        print(json.dumps(figures), flush=True)


def write_record(file: Path, options: argparse.Namespace, **figures: object) -> None:
    """Writes `figures` beside the options; paths among these are cut to their last part."""
    chosen = {name: value.name if isinstance(value, Path) else value for name, value in vars(options).items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"options": chosen, "torch": torch.__version__, **figures}, indent=1))
