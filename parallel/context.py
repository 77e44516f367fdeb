"""ParallelContext: a rank's place in its group and the means to talk to the others; passed down, never global.

Made by groups.init_parallel, or ParallelContext.single() for one rank. The layers read it; the model runner asks which
stage it is and shares sampled tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from parallel.collectives import Collectives, SingleRank
from parallel.mesh import Mesh


def _nothing() -> None:
    """What a group of one has to close."""


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """`tp`: the ranks of this stage. `world`: all ranks of the group, for point-to-point between stages."""

    mesh: Mesh = field(default_factory=Mesh)
    tp: Collectives = field(default_factory=SingleRank)
    world: Collectives = field(default_factory=SingleRank)
    shut_down: Callable[[], None] = _nothing

    @classmethod
    def single(cls) -> "ParallelContext":
        """One rank, no process group."""
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

    def tp_broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """tp rank 0's values, in `tensor`, on every rank of this stage."""
        return self.tp.broadcast(tensor)

    def close(self) -> None:
        """Gives up the process groups. Call once, when no step is under way."""
        self.tp.close()
        self.world.close()
        self.shut_down()
