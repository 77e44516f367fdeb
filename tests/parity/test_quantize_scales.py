"""AWQ's search against another one, written here from the paper (Lin et al. 2023) with AutoAWQ's scales: it runs the
tokens for each scale that it tries, where ours has sums over them. llm-compressor's needs an accelerator."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.workers.models.spec.config.config_reader import load_spec
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.quantize.layer_walk import LayerWalk, OpenLayer
from tandem.workers.quantize.rounding.folds import folds_of
from tandem.workers.quantize.rounding.integer_grid import IntegerGrid
from tandem.workers.quantize.rounding.recorded_linear import InputStats
from tandem.workers.quantize.rounding.scale_search import awq_scale
from tests.support.packed_models import random_ids

TinyFolder = Callable[[str], Path]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BITS, GROUP, STEPS = 4, 32, 20


def nearest(weight_OI: Floats) -> Floats:
    """To the nearest of 16 values between the least and the largest of each group, 0 among them."""
    groups = weight_OI.reshape(len(weight_OI), -1, GROUP)
    least, most = np.minimum(groups.min(-1, keepdims=True), 0), np.maximum(groups.max(-1, keepdims=True), 0)
    step = (most - least) / (2**BITS - 1)
    zero = np.clip(np.round(-least / step), 0, 2**BITS - 1)
    return ((np.clip(np.round(groups / step) + zero, 0, 2**BITS - 1) - zero) * step).reshape(weight_OI.shape)


def searched(weights: Sequence[Floats], x_TI: Floats) -> tuple[float, float, float]:
    """Returns (power, the squares of what outputs change with the best scale, the same without any)."""

    def error_of(scale_I: Floats) -> float:
        changed = (x_TI @ one.T - (x_TI / scale_I) @ nearest(one * scale_I).T for one in weights)
        return float(sum((part**2).sum() for part in changed))

    shares = [abs(one).reshape(len(one), -1, GROUP) for one in weights]
    share_I = np.concatenate([one / one.max(-1, keepdims=True) for one in shares]).reshape(-1, x_TI.shape[1]).mean(0)
    found = [(error_of(np.ones_like(share_I)), 0.0)]
    for step in range(STEPS):
        power = step / STEPS
        scale_I = abs(x_TI).mean(0) ** power / (share_I ** (1 - power) + 1e-4)
        found.append((error_of(scale_I / np.sqrt(scale_I.max() * scale_I.min())), power))
    return min(found)[1], min(found)[0], found[0][0]


def test_awq_finds_the_scale_that_a_search_over_tokens_finds(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder("llama-mha-tied")
    seen: dict[int, list[Floats]] = {}
    add = InputStats.add

    def kept(stats: InputStats, x_TI: torch.Tensor) -> None:
        seen.setdefault(id(stats), []).append(x_TI.double().numpy())
        add(stats, x_TI)

    monkeypatch.setattr(InputStats, "add", kept)
    with torch.inference_mode():
        walk = LayerWalk(folder, load_spec(folder), CpuPlatform(), 24)
        layer = OpenLayer(walk, 0)
        layer.record(layer.linears, walk.embedded(torch.tensor(random_ids(6, 24))))
        folds = list(folds_of(walk.spec.layers[0], layer.params, layer.linears))
        for fold in folds:
            found = awq_scale(fold, lambda _: IntegerGrid(BITS, GROUP, symmetric=False))
            x_TI = np.concatenate(seen[id(fold.linears[0].stats)])
            power, error, before = searched([one.weight().double().numpy() for one in fold.linears], x_TI)
            assert (found.error, found.before) == pytest.approx((error, before), rel=0.01), fold.name
            assert found.power == power or found.error == pytest.approx(error, rel=1e-3), fold.name
    assert len(folds) == 4
