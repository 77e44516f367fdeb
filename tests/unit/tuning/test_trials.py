"""The choice among tiles that were timed: by a device and a clock that are made up."""

import pytest

from tandem.workers.kernels.triton.tiles import CHUNKS, DECODES, FEW, MANY, TunedTiles, attention_use
from tandem.workers.tuning.trials import Trial, best_of, chosen_of, of_candidates, trials_of
from tests.support.fake_tuner import FakeTuner

A, B, C, D = (1, 1), (2, 2), (3, 3), (4, 4)


def tried(tuner: FakeTuner) -> dict[str, tuple[Trial, ...]]:
    return {str(one.use[0]): tuple(trials_of(one, tuner.timer, lambda: True)) for one in tuner.tunables()}


def test_the_fastest_tile_that_runs_and_is_right_is_chosen() -> None:
    """One does not launch, one computes something else, one is fast on one load alone."""
    slow_once = [4.0, 90.0]
    times = {A: [10.0, 20.0], B: RuntimeError("out of shared memory\nof 99"), C: [1.0, 1.0], D: [8.0, 16.0]}
    trials = tried(FakeTuner({"x": times | {(5, 5): slow_once}}, wrong=[C]))
    assert [(trial.tile, trial.why) for trial in trials["x"] if trial.why] == [
        (B, "RuntimeError: out of shared memory"),
        (C, "ArithmeticError: results on load 0 differ from the default's"),
    ]
    best = best_of(trials["x"])
    assert (
        best is not None and best.tile == D and best.us == {"load 0": pytest.approx(8.0), "load 1": pytest.approx(16)}
    )
    assert chosen_of(trials).chosen == {"x": D}


def test_a_little_faster_is_noise() -> None:
    assert chosen_of(tried(FakeTuner({"x": {A: [100.0], B: [98.0]}, "y": {A: [100.0], B: [96.0]}}))).chosen == {"y": B}


def test_without_a_default_there_is_nothing_to_compare_with() -> None:
    tuner = FakeTuner({"x": {A: MemoryError("none left"), B: [1.0]}})
    trials = tried(tuner)
    assert len(trials["x"]) == 1 and best_of(trials["x"]) is None and not chosen_of(trials).chosen
    assert best_of(()) is None


def test_trials_of_what_is_no_candidate_any_more_mean_nothing() -> None:
    tunables = FakeTuner({"x": {A: [1.0], B: [1.0]}, "y": {A: [1.0]}, "z": {A: [1.0]}}).tunables()
    a, b, c = (Trial(tile, {"load 0": us}) for tile, us in ((A, 9.0), (B, 5.0), (C, 1.0)))
    known = {"x": (c, b, a), "y": (b,), "w": (a,)}
    assert of_candidates(known, tunables) == {"x": (a, b), "y": ()}


def test_a_use_without_a_choice_has_its_default() -> None:
    import torch

    use = attention_use("attend_parts", torch.bfloat16, 128, 4, torch.int8)
    default = DECODES[2, 128, True][0]
    words = "attend_parts bfloat16 head 128 group 4 cache int8"
    assert TunedTiles().pick(use, default) is default and TunedTiles({"other": (1,)}).pick(use, default) is default
    assert TunedTiles({words: (32, 64, 8, 2, 256, 1)}).pick(use, default) == type(default)(32, 64, 8, 2, 256, 1)


@pytest.mark.parametrize("table", [CHUNKS, DECODES, FEW, MANY], ids=["chunks", "decodes", "few", "many"])
def test_candidates_are_few_and_different(table: dict[object, list[tuple[int, ...]]]) -> None:
    for candidates in table.values():
        assert 1 <= len(candidates) <= 12 and len(set(candidates)) == len(candidates)
    if table is DECODES:
        assert all(tile.length % tile.positions == 0 for tiles in DECODES.values() for tile in tiles)
