"""A Tuner of no device: tiles take the times that a test says, on its clock."""

from collections.abc import Callable, Mapping, Sequence

import torch

from tandem.workers.tuning.trials import Run, Tile, Tunable
from tandem.workers.tuning.tuned_start import TunedModel
from tandem.workers.tuning.tuning_file import TunedDevice

DEVICE = TunedDevice(gpu="Fake 100", capability="9.0", torch="2", triton="3", source="a")
TRIAL_S = 1.0
"""Seconds that a load of a trial takes."""


class FakeTuner:
    """us: by the word of a use, by tile, microseconds on each load; an Exception is raised by the launch. wrong: tiles
    whose results are far from the others'."""

    def __init__(
        self,
        us: Mapping[str, Mapping[Tile, Sequence[float] | Exception]],
        device: TunedDevice = DEVICE,
        wrong: Sequence[Tile] = (),
    ) -> None:
        self.device = device
        self.now_s = 0.0
        self.timed: list[tuple[str, Tile]] = []
        self.released = 0
        self._us, self._wrong = us, wrong
        self._last: float = 0.0

    def clock(self) -> float:
        return self.now_s

    @property
    def timer(self) -> "FakeTuner":
        return self

    def seconds(self, run: Callable[[int], object]) -> float:
        run(1)
        self.now_s += TRIAL_S
        return self._last * 1e-6

    def tunables(self, model: TunedModel | None = None) -> Sequence[Tunable]:
        return [Tunable((use,), list(us), lambda use=use: self._runs(use)) for use, us in self._us.items()]

    def release(self) -> None:
        self.released += 1

    def _runs(self, use: str) -> dict[str, Run]:
        loads = max(len(us) for us in self._us[use].values() if not isinstance(us, Exception))
        return {f"load {load}": self._run(use, load) for load in range(loads)}

    def _run(self, use: str, load: int) -> Run:
        def run(tile: Tile, call: int) -> torch.Tensor:
            us = self._us[use][tile]
            if isinstance(us, Exception):
                raise us
            if call == 0 and load == 0:
                self.timed.append((use, tile))
            self._last = us[load]
            return torch.tensor([1.0, -3.0 if tile in self._wrong else 1.001])

        return run
