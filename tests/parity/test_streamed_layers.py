"""Layers that stream from host memory compute what resident ones do, bit for bit: every family, every TP and PP degree.

Models of eight layers, so that with two stages each still has layers that take turns in a buffer.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.offload.weights.layer_placement import spread
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.planning.sizes import rank_weights
from tests.support.decoder_ranks import DecoderCase, RankProcesses, run_case
from tests.support.paged_rows import prompt_ids
from tests.support.tiny_models import BY_NAME, ONE_OF_EACH, TinyModel, save_tiny_model

NUM_LAYERS = 8
PROMPTS = [prompt_ids(length, 200, seed=length) for length in (21, 18, 7)]
STEPS = [
    [(0, PROMPTS[0][:12]), (2, PROMPTS[2][:-1])],
    [(2, PROMPTS[2][-1:]), (0, PROMPTS[0][12:]), (1, PROMPTS[1])],
    *[[(row, [5 + row + step]) for row in range(3)] for step in range(3)],
]
PLACEMENTS = {
    "all": spread(NUM_LAYERS, 8),
    "one resident": spread(NUM_LAYERS, 7),
    "mixed": spread(NUM_LAYERS, 5),
    "every other": spread(NUM_LAYERS, 4),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Every tiny model, deeper, made when it is asked for."""
    root = tmp_path_factory.mktemp("deep-models")

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = save_tiny_model(deeper(BY_NAME[name]), root)
            return self[name]

    return Folders()


def deeper(tiny: TinyModel) -> TinyModel:
    """The model with NUM_LAYERS layers, their types as the family has them."""
    changes = {key: value for key, value in tiny.changes.items() if key != "layer_types"}
    return replace(tiny, changes={**changes, "num_hidden_layers": NUM_LAYERS})


def case_of(folder: Path, streamed: tuple[int, ...], tp: int = 1, pp: int = 1, **more: torch.dtype) -> DecoderCase:
    return DecoderCase(folder, tp, pp, STEPS, num_rows=3, max_len=40, streamed=streamed, **more)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ONE_OF_EACH else pytest.mark.parity) for name in sorted(BY_NAME)]
)
def test_streamed_layers_equal_resident_ones(folders: Mapping[str, Path], name: str) -> None:
    resident = run_case(case_of(folders[name], ()), ParallelContext.single())
    assert resident is not None and bool(resident.isfinite().all())
    may_stream = rank_weights(load_spec(folders[name]), Mesh(), 4, packs=True).may_stream
    for words, streamed in PLACEMENTS.items():
        streamed = tuple(layer for layer in streamed if layer in may_stream)
        logits = run_case(case_of(folders[name], streamed), ParallelContext.single())
        assert logits is not None and torch.equal(logits, resident), words


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_too(folders: Mapping[str, Path], dtype: torch.dtype) -> None:
    def logits(streamed: tuple[int, ...]) -> torch.Tensor | None:
        return run_case(case_of(folders["qwen3"], streamed, dtype=dtype), ParallelContext.single())

    resident, streamed = logits(()), logits(PLACEMENTS["one resident"])
    assert resident is not None and streamed is not None and torch.equal(resident, streamed)


CUTS = [(2, 1), (1, 2), (2, 2)]
NAMES = ["llama-mqa-biased", "llama-mha-tied", "mistral-window", "qwen2", "qwen3", "smollm3"]
OFTEN = {("llama-mqa-biased", 2, 1), ("qwen3", 2, 1), ("mistral-window", 1, 2), ("llama-mha-tied", 2, 2)}


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [
        pytest.param(name, *cut, marks=() if (name, *cut) in OFTEN else pytest.mark.parity)
        for name in NAMES
        for cut in CUTS
    ],
)
def test_at_every_degree(
    ranks: RankProcesses, folders: Mapping[str, Path], name: str, tp_size: int, pp_size: int
) -> None:
    local = NUM_LAYERS // pp_size
    results = [
        ranks.call(run_case, tp_size, pp_size, case_of(folders[name], streamed, tp_size, pp_size))[-1]
        for streamed in ((), spread(local, local), spread(local, local - 1))
    ]
    assert all(torch.equal(results[0], logits) for logits in results[1:])
