"""Notes about a starting group for the launcher and the log: missing kernels, streamed weights, adapters, captures, KV
pool, what the model's files say in two ways, LongRoPE's factors.

Called by workers/executor/ with the messages of loaded ranks, by those that build an engine, by planner.py and by
the launcher.
Torch-free.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

from tandem.configs.schema import CacheSettings, EngineSettings
from tandem.offload.kv.kv_groups import KVGroups
from tandem.workers.messages.handshake import ELSEWHERE, RankLoaded, RankReady
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.text.generation_config import generation_of

MIB, GIB = 2**20, 2**30


class PoolFacts(Protocol):
    """The part of ModelFacts that is about KV."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def kv_groups(self) -> KVGroups | None: ...


def kernel_notes(loaded: Sequence[RankLoaded]) -> tuple[str, ...]:
    """A line for each different note of ranks about kernels, with the ranks that have it unless all have."""
    ranks: dict[str, list[int]] = {}
    for message in loaded:
        for note in message.kernel_notes:
            ranks.setdefault(note, []).append(message.rank)
    return tuple(
        note if len(who) == len(loaded) else f"rank {', '.join(map(str, who))}: {note}" for note, who in ranks.items()
    )


def weight_notes(loaded: Sequence[RankLoaded], asked_gib: float) -> tuple[str, ...]:
    """A line for each different placement of weights, with the ranks that have it; none for ranks without streamed
    layers. asked_gib: --cpu-offload-gb."""
    ranks: dict[str, list[int]] = {}
    for message in loaded:
        if message.streamed_layers:
            ranks.setdefault(_placement(message, asked_gib), []).append(message.rank)
    return tuple(f"weights of rank {', '.join(map(str, who))}: {words}" for words, who in ranks.items())


def adapter_notes(loaded: Sequence[RankLoaded]) -> tuple[str, ...]:
    """One line about the adapter pages of all ranks; none without --enable-lora."""
    num_pages = min(message.adapter_pages for message in loaded)
    if not num_pages:
        return ()
    page_bytes = sum(message.adapter_page_bytes for message in loaded)
    return (f"adapters: {num_pages} device pages ({_mib(num_pages * page_bytes)} over {len(loaded)} rank(s))",)


def graph_notes(ready: Sequence[RankReady]) -> tuple[str, ...]:
    """One line about the captures of all ranks, of which each stage has its own: the fewest, the slowest, the bytes of
    the fullest, and why some failed; none where there are none."""
    captures = [message.captures for message in ready if message.captures is not None]
    if not captures:
        return ()
    count, seconds = min(one.num_captures for one in captures), max(one.seconds for one in captures)
    line = f"graphs: {count} in {seconds:.1f} s, {max(one.num_bytes for one in captures) / GIB:.1f} GiB"
    failures = {words: why for one in captures for words, why in one.failures.items() if why != ELSEWHERE}
    if failures:
        words, why = next(iter(failures.items()))
        line += f"; {len(failures)} could not be captured, whose steps run eagerly; the first ({words}): {why}"
    return (line,)


def model_notes(settings: EngineSettings, spec: ArchSpec) -> tuple[str, ...]:
    """Lines about what the model's files say in two ways or that is not applied, and the choice of LongRoPE's factors.
    settings: resolved ones. SettingsError for a generation_config.json that is not read."""
    context = settings.model.max_model_len or spec.max_position_embeddings
    return (*spec.remarks, *_rope_notes(settings, spec), *generation_of(settings.model).notes(context))


def _rope_notes(settings: EngineSettings, spec: ArchSpec) -> tuple[str, ...]:
    """One line about which of LongRoPE's factors --max-model-len has chosen; none for other models."""
    if not spec.short_factors:
        return ()
    context, trained = settings.model.max_model_len or spec.max_position_embeddings, spec.short_context
    if context <= trained:
        return (f"longrope: the short factors, as --max-model-len {context} is within the trained {trained} tokens",)
    return (
        f"longrope: the long factors for all prompts, as --max-model-len {context} is beyond the trained {trained} "
        "tokens; texts of shorter ones differ from transformers', which has the short factors for them",
    )


def warn_of_model(settings: EngineSettings, spec: ArchSpec, log: logging.Logger) -> None:
    """Logs model_notes() as warnings, but for a choice by which texts are those of transformers."""
    context = settings.model.max_model_len or spec.max_position_embeddings
    usual = _rope_notes(settings, spec) if context <= spec.short_context else ()
    for note in model_notes(settings, spec):
        if note not in usual:
            log.warning("%s", note)


def pool_notes(cache: CacheSettings, max_model_len: int, groups: KVGroups) -> tuple[str, ...]:
    """One line when the KV pool is smaller than a context of max_model_len tokens, which only --num-gpu-blocks-override
    allows; else none. The last token of a context needs no KV."""
    if cache.num_blocks is None or (num_slots := groups.longest(cache.num_blocks)) >= max_model_len - 1:
        return ()
    return (
        f"--num-gpu-blocks-override {cache.num_blocks} holds {num_slots} tokens, less than one context of "
        f"{max_model_len}: a prompt and its answer end at {num_slots + 1} tokens; "
        f"{groups.needed(max_model_len - 1)} blocks would hold it all",
    )


def warn_of_pool(cache: CacheSettings, facts: PoolFacts, log: logging.Logger) -> tuple[str, ...]:
    """Returns pool_notes() and logs them as warnings."""
    notes = pool_notes(cache, facts.max_model_len, facts.kv_groups or KVGroups(cache.block_size))
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
