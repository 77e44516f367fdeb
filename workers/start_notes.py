"""What a starting group says of weights that stream, of room for adapters and of a pool that is too small, for the
launcher and the log. Torch-free.

Called by workers/rank_group.py and workers/inprocess_executor.py with what their ranks reported, by whoever puts an
engine on top, and by workers/planning.py.
"""

import logging
from collections.abc import Sequence

from configs.schema import CacheSettings
from workers.messages import RankLoaded

MIB, GIB = 2**20, 2**30


def weight_notes(loaded: Sequence[RankLoaded], asked_gib: float) -> tuple[str, ...]:
    """Nothing when no layer streams; else a line for each different placement and the ranks that have it. asked_gib:
    --cpu-offload-gb."""
    ranks: dict[str, list[int]] = {}
    for message in loaded:
        if message.streamed_layers:
            ranks.setdefault(_placement(message, asked_gib), []).append(message.rank)
    return tuple(f"weights of rank {', '.join(map(str, who))}: {words}" for words, who in ranks.items())


def adapter_notes(loaded: Sequence[RankLoaded]) -> tuple[str, ...]:
    """Nothing without --enable-lora; else a line for the device memory of all ranks together."""
    num_pages = min(message.adapter_pages for message in loaded)
    if not num_pages:
        return ()
    page_bytes = sum(message.adapter_page_bytes for message in loaded)
    return (f"adapters: {num_pages} device pages ({_mib(num_pages * page_bytes)} over {len(loaded)} rank(s))",)


def pool_notes(cache: CacheSettings, max_model_len: int) -> tuple[str, ...]:
    """Nothing when the KV pool holds one context of max_model_len tokens; only --num-gpu-blocks-override may ask for
    less. The last token of a context needs no KV."""
    if cache.num_blocks is None or (num_slots := cache.num_blocks * cache.block_size) >= max_model_len - 1:
        return ()
    return (
        f"--num-gpu-blocks-override {cache.num_blocks} holds {num_slots} tokens, less than one context of "
        f"{max_model_len}: a prompt and its answer end at {num_slots + 1} tokens; "
        f"{-(-(max_model_len - 1) // cache.block_size)} blocks would hold it all",
    )


def warn_of_pool(cache: CacheSettings, max_model_len: int, log: logging.Logger) -> tuple[str, ...]:
    """pool_notes(), as warnings in `log` too."""
    notes = pool_notes(cache, max_model_len)
    for note in notes:
        log.warning("%s", note)
    return notes


def _placement(message: RankLoaded, asked_gib: float) -> str:
    saved_bytes = message.host_weight_bytes - message.buffer_bytes
    short = saved_bytes < int(asked_gib * GIB) and not message.resident_layers
    less = f"; that saves {_mib(saved_bytes)}, less than --cpu-offload-gb {asked_gib:g}" if short else ""
    resident_bytes = message.weight_bytes - message.host_weight_bytes
    return (
        f"{message.resident_layers} layers and the tables resident ({_mib(resident_bytes)}), "
        f"{message.streamed_layers} layers stream from host memory ({_mib(message.host_weight_bytes)}) "
        f"through {_mib(message.buffer_bytes)} of buffers{less}"
    )


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"
