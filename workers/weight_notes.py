"""What a starting group says of weights that stream: one line per placement, for the launcher and the log. Torch-free.

Called by workers/rank_group.py and workers/inprocess_executor.py with what their ranks reported.
"""

from collections.abc import Sequence

from workers.messages import RankLoaded

MIB = 2**20


def weight_notes(loaded: Sequence[RankLoaded]) -> tuple[str, ...]:
    """Nothing when no layer streams; else a line for each different placement and the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for message in loaded:
        if message.streamed_layers:
            ranks.setdefault(_placement(message), []).append(message.rank)
    return tuple(f"weights of rank {', '.join(map(str, who))}: {words}" for words, who in ranks.items())


def _placement(message: RankLoaded) -> str:
    resident_bytes = message.weight_bytes - message.host_weight_bytes
    return (
        f"{message.resident_layers} layers and the tables resident ({_mib(resident_bytes)}), "
        f"{message.streamed_layers} layers stream from host memory ({_mib(message.host_weight_bytes)}) "
        f"through {_mib(message.buffer_bytes)} of buffers"
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
