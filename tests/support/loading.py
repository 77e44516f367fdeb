"""The only rank of a group, loaded by itself."""

from tandem.configs.schema import EngineSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.platforms.open_platform import open_platform
from tandem.workers.rank.loading import LoadedRank, load_rank


def load_single(settings: EngineSettings) -> LoadedRank:
    """In this process, with its thread count set as a rank's."""
    platform = open_platform(settings, rank=0, ranks_on_node=1)
    return load_rank(settings, ParallelContext.single(), platform, rank=0, ranks_on_node=1)
