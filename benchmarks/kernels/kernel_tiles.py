"""Tiles of kernels for a GPU: every candidate's time beside its default's, as `tandem tune` measures them.

    python -m benchmarks.kernels.kernel_tiles [--model llama-8b]

What is found is kept: engines that start later on this machine compute with the fastest (docs/operations.md). JSON goes
to out/benchmarks. --device cpu is for a try without a GPU: Triton's interpreter runs two candidates of each kernel over
small loads, which says nothing about speed, and nothing is kept.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from msgspec.structs import asdict

from benchmarks.models import SHAPES, config_folder
from benchmarks.record import RESULTS, note, write_record
from tandem.configs.schema import CacheSettings, DeviceSettings, EngineSettings, ModelSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.kernels.triton.tiles import words
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.loading import model_to_tune
from tandem.workers.tuning.trials import Trial, Tunable, best_of
from tandem.workers.tuning.tuned_start import TunedModel, Tuner, measure
from tandem.workers.tuning.tuning_file import TunedDevice, add_trials


class InterpreterTuner:
    """A Tuner of Triton's interpreter."""

    device = TunedDevice("none", "none", torch.__version__, "interpreter", "none")

    @property
    def timer(self) -> "InterpreterTuner":
        return self

    def seconds(self, run: Callable[[int], object]) -> float:
        began_s = time.perf_counter()
        run(0)
        return time.perf_counter() - began_s

    def tunables(self, model: TunedModel) -> Sequence[Tunable]:
        from tandem.workers.attention.triton_paged import Multiprocessors
        from tandem.workers.tuning.model_uses import Load, Loads, tunables_of

        loads = Loads((Load(2, 1, 90),), (Load(1, 20, 40),), ((1,), (2,)), 2**16)
        found = tunables_of(model, torch.device("cpu"), Multiprocessors(1, 228 * 2**10), loads)
        return [Tunable(one.use, one.candidates[:2], one.prepare) for one in found]

    def release(self) -> None:
        """Does nothing."""


def figures_of(use: str, trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """A line for each load; prints and notes them."""
    best, found = best_of(trials), list[dict[str, Any]]()
    failed = {" ".join(map(str, trial.tile)): trial.why for trial in trials if trial.why}
    if best is None:
        print(f"{use}: not timed: {failed}", flush=True)
        note(case="tiles failed", use=use, failed=failed, name=use, status="failed", detail=str(failed), seconds=0.0)
        return found
    for load, us in trials[0].us.items():
        figure = {"use": use, "load": load, "default_us": us, "chosen_us": best.us[load], "tile": best.tile}
        print(f"{use}, {load}: {us:.1f} us, {best.us[load]:.1f} with {best.tile}", flush=True)
        note(case="tiles", **figure, tried=len(trials), failed=failed)
        found.append(figure)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8", "int8"))
    options = parser.parse_args()
    is_try = options.device == "cpu"
    if is_try:
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported
    settings = EngineSettings(
        model=ModelSettings(model=str(config_folder(options.model)), dtype="float16" if is_try else "bfloat16"),
        cache=CacheSettings(kv_cache_dtype=options.kv_cache_dtype),
        device=DeviceSettings(device=options.device),
    )
    platform = open_platform(settings, rank=0, ranks_on_node=1)
    tuner: Tuner | None = InterpreterTuner() if is_try else platform.tuner()
    model = model_to_tune(settings, ParallelContext.single(), platform)
    if tuner is None:
        raise SystemExit(f"there are no kernels here to measure: {platform.obstacle(model.dtype)}")
    figures, trials = list[dict[str, Any]](), {}
    for tunable in tuner.tunables(model):
        use = words(tunable.use)
        trials[use] = tuple(trial for _, trial in measure(tuner, [tunable]))
        if not is_try:
            add_trials(tuner.device, {use: trials[use]})
        figures += figures_of(use, trials[use])
    every = {use: [asdict(trial) for trial in own] for use, own in trials.items()}
    write_record(RESULTS / "kernel-tiles.json", options, device=asdict(tuner.device), figures=figures, trials=every)


if __name__ == "__main__":
    main()
