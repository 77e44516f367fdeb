"""The uses of kernels in models, and tiles for them in Triton's interpreter, in a process of its own, which compute
what the default does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.parallel.mesh import Mesh
from tandem.workers.kernels.triton.tiles import words
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.tuning.trials import Tunable, trials_of
from tandem.workers.tuning.tuned_start import TunedModel
from tests.support.fake_tuner import FakeTuner
from tests.support.interpreted import DEVICE, computes, run_in_interpreter, starts
from tests.support.tiny_models import BY_NAME, save_tiny_model

pytest.importorskip("triton")
MOST = 2
"""Candidates of a use; all compute the same way, and the interpreter takes a second for each."""


@starts
def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


def uses_of(
    name: str, folder: Path, kv_dtype: torch.dtype = torch.float16, quantization: str | None = None, **mesh: Any
) -> list[Tunable]:
    """Of a tiny model, on loads that are as small."""
    from tandem.workers.attention.triton_paged import Multiprocessors
    from tandem.workers.tuning.model_uses import Load, Loads, tunables_of

    spec = load_spec(save_tiny_model(BY_NAME[name], folder), quantization=quantization)
    loads = Loads((Load(2, 1, 70),), (Load(1, 18, 20),), ((1,), (4,)), 2**16)
    model = TunedModel(spec, Mesh(**mesh), torch.float16, kv_dtype, 16)
    return tunables_of(model, DEVICE, Multiprocessors(1, 228 * 2**10), loads)


@computes
def test_each_use_of_a_rank_is_there_once(tmp_path: Path) -> None:
    """Layers with a window and without, and their sinks, are one use; experts are four."""
    attention = [f"attend_{kernel} float16 head 64 group 2 cache int8" for kernel in ("parts", "tiles")]
    experts = [
        f"grouped_product float16 experts 4 outputs {outputs} inputs {inputs} rows {rows}"
        for outputs, inputs in ((96, 64), (64, 48))
        for rows in ("few", "many")
    ]
    found = uses_of("gpt_oss", tmp_path, torch.int8, tp_size=2)
    assert [words(one.use) for one in found] == attention + experts
    whole = uses_of("gpt_oss", tmp_path, tp_size=2, expert_parallel=True)
    assert [words(one.use).partition("experts ")[2] for one in whole[2:4]] == [
        f"2 outputs 192 inputs 64 rows {rows}" for rows in ("few", "many")
    ]
    assert uses_of("deepseek_v2", tmp_path)[0].use[0] == "grouped_product", "latents are not the kernel's"
    coded = uses_of("gpt_oss", tmp_path, quantization="int4")
    assert {one.use[0] for one in coded} == {"attend_parts", "attend_tiles"}, "experts that are codes are not"


@computes
@pytest.mark.parametrize(("name", "kv_dtype"), [("gpt_oss", torch.float16), ("gemma3", torch.int8)])
def test_tiles_compute_what_the_default_does(name: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    """With windows and sinks, over a quantized cache; each call of a trial has other blocks, and other experts."""
    tuner = FakeTuner({})
    for tunable in uses_of(name, tmp_path, kv_dtype):
        own = Tunable(tunable.use, tunable.candidates[:MOST], tunable.prepare)
        trials = list(trials_of(own, tuner.timer, lambda: True))
        assert [trial.tile for trial in trials] == [tuple(tile) for tile in own.candidates]
        assert not [trial for trial in trials if trial.why]
        runs = tunable.prepare()
        for run in runs.values():
            first, other = (run(tunable.candidates[0], call).clone() for call in (0, 1))
            assert first.isfinite().all() and not torch.equal(first, other)
