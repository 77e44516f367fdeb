"""Tiles at a start: measured once, within a bound; the same on all ranks of a group."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tandem.configs.platform_facts import TUNING_S
from tandem.configs.schema import DeviceSettings, EngineSettings, ModelSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.platforms.cpu import CpuPlatform
from tandem.workers.rank import loading
from tandem.workers.tuning.tuned_start import own_tiles, start_tiles
from tandem.workers.tuning.tuning_file import read_trials
from tests.support.fake_tuner import DEVICE, FakeTuner
from tests.support.platforms import replaced
from tests.support.thread_ranks import ThreadRanks

A, B, C = (1, 1), (2, 2), (3, 3)
HOST = torch.device("cpu")
MODEL = ModelSettings(model="m")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tiles_of(tuner: FakeTuner) -> tuple[dict[str, Any], str | None]:
    tiles, line = own_tiles(tuner, None, tuner.clock)  # type: ignore[arg-type]
    return tiles.chosen, line


def test_a_second_start_measures_nothing() -> None:
    times = {"x": {A: [9.0], B: [5.0]}, "y": {A: [9.0], B: [9.5]}}
    first, second = FakeTuner(times), FakeTuner(times | {"z": {A: [2.0], C: [1.0]}})
    chosen, line = tiles_of(first)
    assert chosen == {"x": B} and first.released == 1
    assert (
        line is not None and "4 of 4 tiles" in line and "1 of 2 uses are faster" in line and "tandem tune" not in line
    )
    chosen, line = tiles_of(second)
    assert chosen == {"x": B, "z": C} and second.timed == [("z", A), ("z", C)], "what is known is not measured again"
    third = FakeTuner(times)
    assert tiles_of(third) == ({"x": B}, None) and not third.timed and not third.released


def test_a_start_takes_no_longer_than_it_may() -> None:
    """Each use has its share of the seconds; what is not reached has its default, at the next start too."""
    many = {(number, 0): [100.0 - number] for number in range(20)}
    times = {f"use {number}": many for number in range(4)}
    tuner = FakeTuner(times)
    chosen, line = tiles_of(tuner)
    assert TUNING_S <= tuner.now_s < TUNING_S + 4
    assert set(chosen) == set(times) and {use for use, _ in tuner.timed} == set(times)
    assert line is not None and "of 80 tiles" in line and "`tandem tune MODEL` measures the rest" in line
    again = FakeTuner(times)
    assert tiles_of(again) == (chosen, None) and not again.timed


def test_what_cannot_be_measured_has_its_default() -> None:
    tuner = FakeTuner({"x": {A: RuntimeError("no memory"), B: [1.0]}, "y": {A: [2.0], B: [1.0]}})
    assert tiles_of(tuner)[0] == {"y": B} and read_trials(DEVICE)["x"][0].why == "RuntimeError: no memory"


def ranks_of(tp_size: int, pp_size: int, tuners: Sequence[FakeTuner | None]) -> list[dict[str, Any]]:
    def chosen(context: ParallelContext, share: object) -> dict[str, Any]:
        tiles, _ = start_tiles(tuners[context.rank], None, context, HOST)  # type: ignore[arg-type]
        return tiles.chosen

    return ThreadRanks().call(chosen, tp_size, pp_size)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (2, 2), (1, 3)])
def test_all_ranks_have_what_rank_0_has(tp_size: int, pp_size: int) -> None:
    """The others' own times, on the same kind of device, say something else, and are not asked."""
    others = [FakeTuner({"x": {A: [1.0], B: [5.0]}}) for _ in range(tp_size * pp_size - 1)]
    found = ranks_of(tp_size, pp_size, [FakeTuner({"x": {A: [9.0], B: [5.0]}}), *others])
    assert found == [{"x": B}] * (tp_size * pp_size) and not any(tuner.timed for tuner in others)


def test_a_stage_with_another_device_has_the_defaults() -> None:
    """On one rank of the second stage the kernels are missing."""
    tuners: list[FakeTuner | None] = [FakeTuner({"x": {A: [9.0], B: [5.0]}}) for _ in range(3)]
    found = ranks_of(2, 2, [*tuners, None])
    assert [bool(chosen) for chosen in found] == [True, True, False, False]
    other = FakeTuner({}, device=msgspec.structs.replace(DEVICE, gpu="Fake 200"))
    assert ranks_of(2, 1, [tuners[0], other]) == [{}, {}]
    assert ranks_of(2, 1, [None, tuners[0]]) == [{}, {}], "rank 0 has no kernels"


def test_a_file_chooses_among_candidates_alone() -> None:
    assert tiles_of(FakeTuner({"x": {A: [9.0], (777, 1): [1.0]}}))[0] == {"x": (777, 1)}
    assert tiles_of(FakeTuner({"x": {A: [9.0], B: [5.0]}})) == ({}, None)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        (EngineSettings(model=MODEL), {"x": B}),
        (EngineSettings(model=MODEL, device=DeviceSettings(tune=False)), {}),
        (EngineSettings(model=ModelSettings(model="m", batch_invariant=True)), {}),
    ],
    ids=["by default", "--no-tune", "--batch-invariant"],
)
def test_a_rank_gives_its_platform_the_tiles(settings: EngineSettings, chosen: dict[str, Any]) -> None:
    """Before it asks for attention or experts; groups of --batch-invariant may stand on unlike machines."""
    tuner = FakeTuner({"x": {A: [9.0], B: [5.0]}})
    platform = replaced(CpuPlatform(), tunes=True, tuner=lambda: tuner)
    rank = loading._Chosen(
        settings=settings, spec=None, context=ParallelContext.single(), platform=platform, dtype=torch.float32,
        kv_name="float32", kv_dtype=torch.float32, max_model_len=1, ranks_on_node=1, groups=None,
    )  # type: ignore[arg-type]  # fmt: skip
    lines = loading._tune(rank)
    assert platform.tiles.chosen == chosen and bool(tuner.timed) == bool(chosen) == bool(lines)
