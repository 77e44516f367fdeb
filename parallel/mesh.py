"""A rank's coordinates on the tensor (tp) and pipeline (pp) axes. Pure arithmetic, torch-free.

Ranks of one stage are neighbours (tp is the inner axis), since they communicate most.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mesh:
    """The place of one rank in tp_size x pp_size ranks: rank = pp_rank * tp_size + tp_rank.

    expert_parallel: the ranks of a stage hold whole experts, each others, where they otherwise hold a part of each.
    """

    tp_size: int = 1
    pp_size: int = 1
    rank: int = 0
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        assert self.tp_size >= 1 and self.pp_size >= 1, (self.tp_size, self.pp_size)
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    def rank_at(self, tp_rank: int, pp_rank: int) -> int:
        return pp_rank * self.tp_size + tp_rank

    def tp_group(self, pp_rank: int) -> list[int]:
        """Returns the ranks of one stage, in tp order."""
        return [self.rank_at(tp, pp_rank) for tp in range(self.tp_size)]


def layer_range(num_layers: int, pp_rank: int, pp_size: int) -> range:
    """Returns the layers of one stage: contiguous, with sizes that differ by at most one.

    The first and the last stage also hold a vocabulary table, so stages in the middle take the longer shares.
    """
    base, longer = divmod(num_layers, pp_size)
    middle_first = sorted(range(pp_size), key=lambda stage: (stage in (0, pp_size - 1), stage))
    sizes = [base + (stage in middle_first[:longer]) for stage in range(pp_size)]
    start = sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])
