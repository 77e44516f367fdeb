"""ParallelContext: a rank's place in its group and its collectives; passed down, never global.

Made by groups.init_parallel, or by ParallelContext.single() for one rank. The layers read it, and so does the model
runner, which shares sampled tokens through it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.parallel.exchange.collectives import Collectives, SingleRank
from tandem.parallel.exchange.step_collectives import StepCollectives
from tandem.parallel.mesh import Mesh


def _nothing() -> None:
    """Shuts down a group of one: does nothing."""


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """A rank's mesh coordinates and collectives. `tp`: ranks of this stage; `world`: all ranks, for sends between
    stages."""

    mesh: Mesh = field(default_factory=Mesh)
    tp: StepCollectives = field(default_factory=lambda: StepCollectives(SingleRank(), 1))
    world: Collectives = field(default_factory=SingleRank)
    shut_down: Callable[[], None] = _nothing

    @classmethod
    def single(cls) -> "ParallelContext":
        """Returns the context of one rank without a process group."""
        return cls()

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def tp_rank(self) -> int:
        return self.mesh.tp_rank

    @property
    def tp_size(self) -> int:
        return self.mesh.tp_size

    @property
    def pp_rank(self) -> int:
        return self.mesh.pp_rank

    @property
    def pp_size(self) -> int:
        return self.mesh.pp_size

    @property
    def is_first_stage(self) -> bool:
        return self.mesh.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.mesh.pp_rank == self.mesh.pp_size - 1

    def close(self) -> None:
        """Releases the process groups. Call it once, when no step is under way."""
        self.tp.close()
        self.world.close()
        self.shut_down()
