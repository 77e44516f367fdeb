"""What `tandem quantize` holds in memory: one layer, however many there are, and a vocabulary in parts, by which the
scores come out as those of whole rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.workers.evaluation.judgement import scores_of_rows
from tandem.workers.quantize.head_scores import RunningScores

MEASURED = """
import gc, json, re, sys, torch
from dataclasses import replace
from pathlib import Path
torch.set_num_threads(1)
from tandem.workers.quantize.freed_memory import free_at_once
from tests.support.packed_models import quantized
from tandem.workers.quantize.quantize_settings import QuantizeSettings
from tests.support.tiny_models import BY_NAME, save_tiny_model
free_at_once()
def peak_of(layers, vocabulary, run=0):
    size = {"hidden_size": 256, "intermediate_size": 1536, "num_hidden_layers": layers, "vocab_size": vocabulary}
    name = f"m{layers}-{vocabulary}-{run}"
    folder = save_tiny_model(replace(BY_NAME["llama-gqa"], name=name, changes=size), Path(sys.argv[1]))
    gc.collect()  # of the model that was saved
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here on
    quantized(folder, Path(sys.argv[1]) / f"{name}-out", QuantizeSettings(method="rtn"), count=2)
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
peak_of(1, 512)
many = min(peak_of(12, 512, run) for run in range(3))
print(json.dumps([peak_of(2, 512), many, peak_of(1, 49152)]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts peaks")
def test_memory_does_not_grow_with_layers_or_with_the_vocabulary(tmp_path: Path) -> None:
    """A layer has 5.2 MB in float32, the larger vocabulary 50 MB for each of its two tables."""
    done = subprocess.run([sys.executable, "-c", MEASURED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    few, many, wide = json.loads(done.stdout.splitlines()[-1])
    layer, table = 4 * (3 * 256 * 1536 + 2 * 256 * 256), 4 * 49152 * 256
    assert many - few < 4 * layer, "ten layers more; the least of three peaks, as mapped pages of files count too"
    assert wide - few < table, "a table, of which there are two"


def test_scores_by_parts_of_the_vocabulary_are_those_of_whole_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    own_NV, ref_NV = (9 * torch.randn(7, 50, generator=generator) for _ in range(2))
    own_NV[:, 20:] += 200  # what was summed before falls to nothing
    ref_NV[3, 12] = own_NV[3, 12] = -torch.inf  # a token that neither model has
    next_N = torch.tensor([0, 49, 20, 19, 7, 33, 21])
    scores = RunningScores(next_N)
    for first in range(0, 50, 20):
        scores.add(first, own_NV[:, first : first + 20].clone(), ref_NV[:, first : first + 20].clone())
    expected = scores_of_rows(own_NV.double().log_softmax(1), next_N, ref_NV.double().log_softmax(1))
    for found, wanted in zip(scores.columns(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
