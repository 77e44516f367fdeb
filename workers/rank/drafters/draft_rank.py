"""The draft model of a rank: its weights, beside the model's, and the proposer that runs it over the model's blocks.

Called by workers/rank/loading.py. The draft is whole on the first rank of the last stage, whatever the group's degrees
are: it is small, so what its ranks would tell each other takes longer than what they would save. The others get its
guesses (shared_drafts.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from tandem.configs.errors import SettingsError
from tandem.configs.json_flags import SPECULATIVE_CONFIG
from tandem.configs.schema import EngineSettings
from tandem.parallel.context import ParallelContext
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.planning.resolve import draft_spec, drafts_here
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import DeviceRows
from tandem.workers.rank.drafters.draft_model import DraftBlocks, DraftModel, DraftRows
from tandem.workers.rank.drafters.shared_drafts import SharedDrafts
from tandem.workers.speculation.proposer import MakeProposer, Proposer, make_proposer

DRAFTERS: Final = {"draft_model": DraftModel}
"""Proposers with a model, by the `method` of --speculative-config; those without one are in PROPOSERS."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model whose weights are in memory. max_len: tokens of the longest sequence that it can guess for."""

    decoder: Decoder
    max_len: int


def load_draft(
    settings: EngineSettings,
    context: ParallelContext,
    platform: Platform,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    windows: tuple[int | None, ...],
) -> LoadedDraft | None:
    """Reads the draft model on the rank that runs it; None elsewhere, and without one. dtype: of its weights that have
    no scheme of their own; kv_dtype: of the cache. SettingsError when it does not fit into the device's memory."""
    spec = draft_spec(settings) if drafts_here(context.mesh) else None
    model = settings.model.draft
    if spec is None or model is None:
        return None
    try:
        decoder = build_decoder(
            spec,
            ParallelContext.single(),
            folder=Path(model.model),
            dtype=dtype,
            platform=platform,
            kv_dtype=kv_dtype,
            load_format=model.load_format,
            seed=model.seed or 0,
            windows=windows,
        )
    except torch.OutOfMemoryError as error:
        words = f"model: the draft's weights do not fit on {platform.device} beside the model's: {error}"
        raise SettingsError(words, SPECULATIVE_CONFIG) from error
    return LoadedDraft(decoder, spec.max_position_embeddings)


def make_of(
    settings: EngineSettings,
    context: ParallelContext,
    platform: Platform,
    loaded: LoadedDraft | None,
    kv: DraftBlocks,
    table: DraftRows,
) -> MakeProposer | None:
    """Returns what makes the rank's proposer over its rows; None without speculative decoding. loaded: its draft
    model, where it has one."""
    if settings.model.draft is None:
        proposer = make_proposer(settings.speculative)
        return None if proposer is None else lambda _: proposer

    def make(rows: DeviceRows) -> Proposer:
        own: Proposer | None = None
        if loaded is not None:
            assert settings.speculative is not None, "a draft model without --speculative-config"
            own = DRAFTERS[settings.speculative.method](loaded.decoder, loaded.max_len, kv, table, rows, platform)
        if context.tp_size == 1 and own is not None:
            return own
        return SharedDrafts(own, context.tp, settings.max_drafts, platform)

    return make
