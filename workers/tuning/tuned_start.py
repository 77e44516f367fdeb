"""Tiles of kernels at the start of a rank: those that are known to be the fastest here, measured if nothing is known.

Rank 0 reads the file of trials, measures for at most TUNING_S what it has nothing about, and tells all ranks of its
group, so that they compute alike. What the seconds do not suffice for has its default; `tandem tune` takes longer.
Called by workers/rank/loading.py, in step with all ranks, before anything is in the device's memory.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import torch

from tandem.configs.platform_facts import TUNING_S
from tandem.parallel.context import ParallelContext
from tandem.parallel.mesh import Mesh
from tandem.workers.kernels.triton.tiles import TunedTiles, words
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.tuning.trials import Timer, Trial, Trials, Tunable, best_of, chosen_of, of_candidates, trials_of
from tandem.workers.tuning.tuning_file import TunedDevice, add_trials, read_trials

log = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class TunedModel:
    """The model of a rank, as far as kernels depend on it. kv_dtype: of the cache."""

    spec: ArchSpec
    mesh: Mesh
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int


class Tuner(Protocol):
    """A device and what measures it, of a platform."""

    @property
    def device(self) -> TunedDevice: ...

    @property
    def timer(self) -> Timer: ...

    def tunables(self, model: TunedModel) -> Sequence[Tunable]:
        """Returns the uses of kernels in a model."""
        ...

    def release(self) -> None:
        """Gives back the memory that trials took."""
        ...


class ChosenTiles(msgspec.Struct, frozen=True):
    """The message of rank 0: the digest of its device, and the tiles that are not the defaults, by their use."""

    device: str
    tiles: dict[str, tuple[int, ...]]


def measure(
    tuner: Tuner, tunables: Sequence[Tunable], limit_s: float | None = None, clock: Clock = time.monotonic
) -> Generator[tuple[Tunable, Trial], None, None]:
    """Yields each trial as it is made. limit_s: each use has an equal share of what is left; None: no limit."""
    end_s = None if limit_s is None else clock() + limit_s
    try:
        for place, tunable in enumerate(tunables):
            until_s = math.inf if end_s is None else clock() + (end_s - clock()) / (len(tunables) - place)
            for trial in trials_of(tunable, tuner.timer, partial(_is_before, until_s, clock)):
                yield tunable, trial
    finally:
        tuner.release()


def _is_before(end_s: float, clock: Clock) -> bool:
    return clock() < end_s


def own_tiles(tuner: Tuner, model: TunedModel, clock: Clock = time.monotonic) -> tuple[TunedTiles, str | None]:
    """Returns the tiles of this device, and a line for the user where something was measured for them."""
    tunables, began_s = tuner.tunables(model), clock()
    known = of_candidates(read_trials(tuner.device), tunables)
    missing = [tunable for tunable in tunables if words(tunable.use) not in known]
    if not missing:
        return chosen_of(known), None
    log.info("measuring tiles for %d uses of kernels, up to %d s (--no-tune: not)", len(missing), TUNING_S)
    own: Trials = {words(tunable.use): () for tunable in missing}  # what is not reached has its default from now on
    with closing(measure(tuner, missing, TUNING_S, clock)) as made:
        for tunable, trial in made:
            own[words(tunable.use)] += (trial,)
    add_trials(tuner.device, own)
    return chosen_of({**known, **own}), _line(own, missing, clock() - began_s)


def _line(own: Trials, tunables: Sequence[Tunable], seconds: float) -> str:
    made, wanted = sum(map(len, own.values())), sum(len(tunable.candidates) for tunable in tunables)
    faster = sum(best_of(trials) not in (None, *trials[:1]) for trials in own.values())
    rest = "" if made == wanted else "; `tandem tune MODEL` measures the rest"
    return (
        f"tuning: {made} of {wanted} tiles of kernels measured for this GPU in {seconds:.1f} s, "
        f"{faster} of {len(tunables)} uses are faster than with the default{rest}"
    )


def agreed_tiles(own: ChosenTiles | None, device: str, context: ParallelContext, memory: torch.device) -> TunedTiles:
    """Returns the tiles of rank 0, which all ranks of a group call together; the defaults on a stage with ranks of
    another kind. own: of rank 0. device: the digest of this rank's. memory: where collectives are."""
    content = msgspec.json.encode(own) if own is not None else b""
    size = int(_passed_on(torch.tensor([len(content)], device=memory), context))
    values_N = torch.zeros(size, dtype=torch.int64, device=memory)
    values_N[: len(content)] = torch.tensor(list(content), dtype=torch.int64, device=memory)
    found = msgspec.json.decode(bytes(_passed_on(values_N, context).tolist()), type=ChosenTiles)
    differs = int(context.tp.all_reduce(torch.tensor([int(found.device != device)], device=memory)))
    if differs:
        log.warning("kernels have their default tiles: %d ranks of the stage have another GPU than rank 0", differs)
        return TunedTiles()
    return TunedTiles(found.tiles)


def _passed_on(values: torch.Tensor, context: ParallelContext) -> torch.Tensor:
    """Returns rank 0's values on every rank; the others of its stage have zeros, later stages anything of the size."""
    if context.is_first_stage:
        values = context.tp.all_reduce(values)
    else:
        values = context.world.recv(values, context.rank - context.tp_size)
    if context.pp_rank < context.pp_size - 1:
        context.world.isend(values, context.rank + context.tp_size).wait()
    return values


def start_tiles(
    tuner: Tuner | None, model: TunedModel, context: ParallelContext, memory: torch.device
) -> tuple[TunedTiles, str | None]:
    """Returns the tiles that all ranks of a group compute with, and a line for the user. tuner: None where this rank
    has no kernels to tune."""
    digest, found, line = "" if tuner is None else tuner.device.digest, None, None
    if context.rank == 0:
        tiles = TunedTiles()
        if tuner is not None:
            tiles, line = own_tiles(tuner, model)
        found = ChosenTiles(digest, {use: tuple(tile) for use, tile in tiles.chosen.items()})
    return agreed_tiles(found, digest, context, memory), line
