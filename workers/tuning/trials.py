"""Trials: candidates of a kernel's use, run on the device, beside its default; and the choice among them.

Knows no kernel and no device: a Tunable says how it is run, a Timer how long that takes. Called by tuned_start.py and
by `tandem tune`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec
import torch

from tandem.workers.kernels.triton.tiles import TunedTiles, Use, words

LEAST_GAIN: Final = 0.03
"""The share of its default's time that a tile must save: less is noise."""
TOLERANCE: Final = 0.02
"""The largest difference from its default's results, over the largest of these, that a tile may have."""

Tile = tuple[int, ...]
Run = Callable[[Tile, int], torch.Tensor]
"""Launches a kernel with a tile; the number of the call says which of equal inputs it reads. Returns the result."""


class Timer(Protocol):
    """A clock of the device's work."""

    def seconds(self, run: Callable[[int], object]) -> float:
        """Returns the time of one call on the device, of several that it numbers from 0."""
        ...


@dataclass(frozen=True, slots=True)
class Tunable:
    """A use of a kernel. candidates: its tiles, the default first. prepare: allocates inputs; returns what launches it
    on each of several loads, by their names."""

    use: Use
    candidates: Sequence[Tile]
    prepare: Callable[[], Mapping[str, Run]]


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of a tile. us: microseconds on each load, by name; empty where it failed. why: it failed."""

    tile: tuple[int, ...]
    us: dict[str, float] = {}
    why: str = ""


Trials = dict[str, tuple[Trial, ...]]
"""Trials by the words of a use; of one that was not reached in time there are none."""


def trials_of(tunable: Tunable, timer: Timer, goes_on: Callable[[], bool]) -> Iterator[Trial]:
    """Yields the trials of a use as they are made, its default's first. goes_on: is asked before each."""
    runs: Mapping[str, Run] | None = None
    expected: dict[str, torch.Tensor] = {}
    for tile in map(tuple, tunable.candidates):
        if not goes_on():
            return
        try:
            runs = tunable.prepare() if runs is None else runs
            trial = Trial(tile, _us(tile, runs, expected, timer))
        except Exception as error:  # whatever a compiler or a launch raises is the outcome of this tile alone
            trial = Trial(tile, why=f"{type(error).__name__}: {error}".partition("\n")[0])
        yield trial
        if trial.why and tile == tunable.candidates[0]:
            return  # there is nothing to compare others with


def _us(tile: Tile, runs: Mapping[str, Run], expected: dict[str, torch.Tensor], timer: Timer) -> dict[str, float]:
    """Returns the microseconds of a tile on each load. expected: the default's results, put there by its own trial."""
    for name, run in runs.items():
        own = run(tile, 0).float()
        if not _is_near(own, expected.setdefault(name, own.clone())):
            raise ArithmeticError(f"results on {name} differ from the default's")
    return {name: 1e6 * timer.seconds(partial(run, tile)) for name, run in runs.items()}


def _is_near(own: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((own - expected).abs().max() <= TOLERANCE * expected.abs().max())


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Returns the trial of the tile to use: the least of the means over loads of time over the default's, if it is less
    by LEAST_GAIN, else the default's. None where the default was not timed."""
    if not trials or not trials[0].us:
        return None
    best = min((trial for trial in trials if trial.us), key=lambda trial: share(trial, trials[0]))
    return best if share(best, trials[0]) < 1 - LEAST_GAIN else trials[0]


def share(trial: Trial, default: Trial) -> float:
    """Returns the geometric mean over loads of a tile's time over the default's."""
    return math.exp(sum(math.log(trial.us[name] / us) for name, us in default.us.items()) / len(default.us))


def chosen_of(trials: Trials) -> TunedTiles:
    """Returns the choices that are not the defaults."""
    chosen = {}
    for use, own in trials.items():
        best = best_of(own)
        if best is not None and best is not own[0]:
            chosen[use] = best.tile
    return TunedTiles(chosen)


def of_candidates(trials: Mapping[str, Sequence[Trial]], tunables: Sequence[Tunable]) -> Trials:
    """Returns what is known of these uses: trials of tiles that are still candidates, in their order. Those of a use
    whose default was not tried mean nothing."""
    found: Trials = {}
    for tunable in tunables:
        use = words(tunable.use)
        if use in trials:
            by_tile = {trial.tile: trial for trial in trials[use]}
            known = tuple(by_tile[tile] for each in tunable.candidates if (tile := tuple(each)) in by_tile)
            found[use] = known if known and known[0].tile == tuple(tunable.candidates[0]) else ()
    return found
