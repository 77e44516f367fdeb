"""The draft of a rank: a model or a head beside the model, and the proposer that runs it over the model's blocks.

Called by workers/rank/loading.py. The draft is whole on the first rank of the last stage, whatever the group's degrees
are: it is small, so what its ranks would tell each other takes longer than what they would save. The others get its
guesses (shared_drafts.py).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import torch
from safetensors import safe_open

from tandem.configs.errors import SettingsError
from tandem.configs.json_flags import DRAFT_MODEL, SPECULATIVE_CONFIG
from tandem.configs.schema import EngineSettings, ModelSettings
from tandem.parallel.checkpoint import DummySource, ParameterSlot, WeightSource, load
from tandem.parallel.context import ParallelContext
from tandem.parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from tandem.parallel.params import Param
from tandem.parallel.quantization.stored_weights import UndoneTable, is_stored
from tandem.parallel.stored.headers import weight_files
from tandem.parallel.stored.safetensors_source import SafetensorsSource
from tandem.parallel.stored.stored_checkpoint import StoredCheckpoint
from tandem.workers.models.decoder import Decoder, build_decoder
from tandem.workers.models.spec.arch import ArchSpec
from tandem.workers.models.spec.config.head_config import HeadSpec, StreamParams
from tandem.workers.models.spec.kv_layout import KVLayout, layouts_of
from tandem.workers.planning.resolve import draft_spec, drafts_here, read_spec
from tandem.workers.planning.stored_model import open_checkpoint
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.device_rows import DeviceRows
from tandem.workers.rank.drafters.draft_model import DraftModel
from tandem.workers.rank.drafters.eagle_head import EagleHead, Embed
from tandem.workers.rank.drafters.guess_draw import DraftBlocks, DraftRows, GuessRoom
from tandem.workers.rank.drafters.head_drafts import HeadDrafts
from tandem.workers.rank.drafters.medusa_drafts import MedusaDrafts, MedusaHeads, Normed
from tandem.workers.rank.drafters.shared_drafts import SharedDrafts, SharedHeads
from tandem.workers.rank.drafters.stream_head import Logits, StreamHead
from tandem.workers.speculation.proposer import MakeProposer, Proposer
from tandem.workers.speculation.proposers import make_proposer


def _nothing() -> None:
    """Closes a head: it holds nothing but its weights."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft whose weights are in memory, in bytes. layouts: of its KV, in the blocks behind the model's. make: its
    proposer, over a rank's cache and rows; method: which one."""

    layouts: tuple[KVLayout, ...]
    weight_bytes: int
    make: Callable[[DraftBlocks, DraftRows, DeviceRows, GuessRoom], Proposer]
    close: Callable[[], None] = _nothing
    method: str = ""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """The order of a draft: the group's settings, this rank's place and platform, the dtypes of weights and KV,
    the windows of the groups of layers, and the rank's part of the model."""

    settings: EngineSettings
    context: ParallelContext
    platform: Platform
    dtype: torch.dtype
    kv_dtype: torch.dtype
    windows: tuple[int | None, ...]
    model: Decoder

    @property
    def appends(self) -> bool:
        """True if what steps sample is added to rows on the device: with one stage."""
        return self.context.pp_size == 1

    @property
    def draft(self) -> ModelSettings:
        assert self.settings.model.draft is not None
        return self.settings.model.draft


def load_draft(
    settings: EngineSettings,
    context: ParallelContext,
    platform: Platform,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    windows: tuple[int | None, ...],
    model: Decoder,
) -> LoadedDraft | None:
    """Reads the draft on the rank that runs it; None elsewhere, and without one. dtype: of its weights that have no
    scheme of their own; kv_dtype: of the cache; model: this rank's, whose steps a head reads from now on, also from
    stages before the one that runs it. SettingsError when it cannot be read, or does not fit into the device's
    memory."""
    spec = draft_spec(settings) if context.tp_rank == 0 else None
    if isinstance(spec, HeadSpec):
        model.listen(spec.taps)
    if spec is None or settings.speculative is None or not drafts_here(context.mesh):
        return None
    asked = DraftOrder(settings, context, platform, dtype, kv_dtype, windows, model)
    try:
        method = settings.speculative.method
        return replace(DRAFTERS[method](asked, spec), method=method)
    except torch.OutOfMemoryError as error:
        words = f"model: the draft's weights do not fit on {platform.device} beside the model's: {error}"
        raise SettingsError(words, SPECULATIVE_CONFIG) from error
    except SettingsError as error:
        raise SettingsError(f"model: {error.args[0]}", SPECULATIVE_CONFIG) from error


def make_of(
    settings: EngineSettings,
    context: ParallelContext,
    platform: Platform,
    loaded: LoadedDraft | None,
    kv: DraftBlocks,
    table: DraftRows,
) -> MakeProposer | None:
    """Returns what makes the rank's proposer over its rows; None without speculative decoding, and with several stages
    on all ranks but the one that samples. loaded: its draft, where it has one."""
    has_stages = context.pp_size > 1
    if has_stages and not drafts_here(context.mesh):
        return None
    if settings.model.draft is None:
        proposer = make_proposer(settings.speculative)
        return None if proposer is None else lambda _: proposer

    def make(rows: DeviceRows) -> Proposer:
        room = GuessRoom(len(table.lives), settings.max_drafts, platform.device)
        own = None if loaded is None else loaded.make(kv, table, rows, room)
        if own is not None and (context.tp_size == 1 or has_stages):
            return own
        has_head = settings.speculative is not None and settings.speculative.method != DRAFT_MODEL
        kind = SharedHeads if has_head else SharedDrafts
        return kind(own, context.tp, settings.max_drafts, room, platform)

    return make


# ---- the kinds of drafts ----


def _draft_model(asked: DraftOrder, spec: ArchSpec | HeadSpec) -> LoadedDraft:
    assert isinstance(spec, ArchSpec)
    draft, platform, longest = asked.draft, asked.platform, spec.max_position_embeddings
    decoder = build_decoder(
        spec,
        ParallelContext.single(),
        folder=Path(draft.model),
        dtype=asked.dtype,
        platform=platform,
        kv_dtype=asked.kv_dtype,
        load_format=draft.load_format,
        seed=draft.seed or 0,
        windows=asked.windows,
    )
    return LoadedDraft(
        decoder.kv_layouts,
        decoder.weight_bytes,
        lambda kv, table, rows, room: DraftModel(decoder, longest, kv, table, rows, room, platform),
        decoder.close,
    )


def _eagle3(asked: DraftOrder, spec: ArchSpec | HeadSpec) -> LoadedDraft:
    assert isinstance(spec, HeadSpec) and spec.spec is not None
    platform, vocab_size, longest = asked.platform, asked.model.vocab_size, spec.spec.max_position_embeddings
    embed, embed_bytes = _embedding(asked) if not _has_embedding(spec) else (_no_embedding, 0)
    head = EagleHead(spec, platform, asked.dtype, asked.kv_dtype, embed)
    weight_bytes = embed_bytes + _load(asked, spec, head)
    ids = None if spec.vocab_size == vocab_size else _ids_of(asked, spec.vocab_size)
    return LoadedDraft(
        layouts_of(spec.layers, 1, asked.windows),
        weight_bytes,
        lambda kv, table, rows, room: HeadDrafts(
            head, ids, vocab_size, longest, kv, table, rows, room, platform, appends=asked.appends
        ),
    )


def _stream(asked: DraftOrder, spec: ArchSpec | HeadSpec) -> LoadedDraft:
    """Loads an EAGLE-1 or EAGLE-2 head, or an MTP layer."""
    assert isinstance(spec, HeadSpec) and spec.spec is not None and isinstance(spec.params, StreamParams)
    platform, model, longest = asked.platform, asked.model, spec.spec.max_position_embeddings
    embed, embed_bytes = (_no_embedding, 0) if _has_embedding(spec) else _embedding(asked)
    logits, head_bytes = (None, 0) if spec.params.head is not None else _model_head(asked)
    head = StreamHead(spec, platform, asked.dtype, asked.kv_dtype, embed, logits, _normed(model))
    weight_bytes = embed_bytes + head_bytes + _load(asked, spec, head)
    return LoadedDraft(
        layouts_of(spec.layers, 1, asked.windows),
        weight_bytes,
        lambda kv, table, rows, room: HeadDrafts(
            head, None, model.vocab_size, longest, kv, table, rows, room, platform, appends=asked.appends
        ),
    )


def _normed(model: Decoder) -> Normed:
    """Returns what gives the hidden states after the model's final norm."""
    return lambda heard, at: model.normed(heard.branch_TH, heard.residual_TH, at)


def _medusa(asked: DraftOrder, spec: ArchSpec | HeadSpec) -> LoadedDraft:
    assert isinstance(spec, HeadSpec) and spec.most is not None
    heads, model, platform, most = (
        MedusaHeads(spec, asked.platform, asked.dtype),
        asked.model,
        asked.platform,
        spec.most,
    )
    weight_bytes = _load(asked, spec, heads)
    return LoadedDraft(
        (),
        weight_bytes,
        lambda _, table, rows, room: MedusaDrafts(
            heads, most, _normed(model), table, rows, room, platform, appends=asked.appends
        ),
    )


DRAFTERS: Final[dict[str, Callable[[DraftOrder, ArchSpec | HeadSpec], LoadedDraft]]] = {
    DRAFT_MODEL: _draft_model,
    "eagle3": _eagle3,
    "eagle": _stream,
    "mtp": _stream,
    "medusa": _medusa,
}
"""Loaders of drafts with weights, by the `method` of --speculative-config; those without any are in PROPOSERS."""


# ---- heads ----


class _Slots(Protocol):
    def slots(self) -> Iterator[ParameterSlot]: ...


def _load(asked: DraftOrder, spec: HeadSpec, head: _Slots) -> int:
    """Fills a head's parameters; returns their bytes."""
    return _fill(asked, head.slots(), Path(asked.draft.model), spec.params, spec.ignored)


def _fill(
    asked: DraftOrder,
    slots: Iterable[ParameterSlot],
    folder: Path,
    params: Iterable[Param],
    ignored: tuple[str, ...] = (),
) -> int:
    source: WeightSource
    if asked.draft.load_format == "dummy":
        source = DummySource(asked.draft.seed or 0, asked.dtype, asked.platform.device)
    else:
        source = SafetensorsSource(StoredCheckpoint(folder, params, ignored), asked.platform.read_ahead)
    return load([*slots], source, dtype=asked.dtype, device=asked.platform.device, progress=False)


def _has_embedding(spec: HeadSpec) -> bool:
    return any(param.role == "embedding" for param in spec.params)


def _no_embedding(ids_T: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the head has an embedding of its own")


def _embedding(asked: DraftOrder) -> tuple[Embed, int]:
    """Returns the model's embedding for a head that has none, and the bytes that it adds: where the rank has all of it,
    that one."""
    if asked.context.world_size == 1:
        return asked.model.embed, 0
    table, alone = asked.model.parameters.embedding, ParallelContext.single()
    embedding = VocabParallelEmbedding(table, alone)
    codes = UndoneTable(table, alone.mesh, asked.dtype, embedding.accept) if is_stored((table,)) else None
    return embedding, _read_whole(asked, embedding if codes is None else codes)


def _model_head(asked: DraftOrder) -> tuple[Logits, int]:
    """Returns the model's head for a head that has none, as _embedding() does the embedding."""
    if asked.context.tp_size == 1:
        return lambda hidden_SH: asked.model.logits(hidden_SH, None), 0
    make = partial(asked.platform.linear, dtype=asked.dtype)
    head = VocabParallelHead(asked.model.parameters.head, ParallelContext.single(), make)
    return head, _read_whole(asked, head)


def _read_whole(asked: DraftOrder, part: _Slots) -> int:
    """Reads a part of the model of which this rank has only some, whole; returns its bytes."""
    source: WeightSource
    if asked.draft.load_format == "dummy":
        source = DummySource(asked.draft.seed or 0, asked.dtype, asked.platform.device)
    else:
        model = asked.settings.model
        checkpoint = open_checkpoint(Path(model.model), read_spec(asked.settings), model.hf_overrides)
        source = SafetensorsSource(checkpoint, asked.platform.read_ahead)
    return load([*part.slots()], source, dtype=asked.dtype, device=asked.platform.device, progress=False)


def _ids_of(asked: DraftOrder, count: int) -> torch.Tensor:
    """Returns the model's id of each id of a head with fewer: its own plus what d2t says. SettingsError where there is
    no d2t, and where it names ids that the model lacks."""
    folder, most = Path(asked.draft.model), asked.model.vocab_size
    if asked.draft.load_format == "dummy":
        return asked.platform.accelerator.to_device(torch.arange(count))
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            if "d2t" in tensors.keys():  # noqa: SIM118 - it is no mapping
                far = tensors.get_tensor("d2t").to(torch.int64)
                ids = far + torch.arange(count) if far.shape == (count,) else torch.tensor([-1])
                if ids.min() < 0 or ids.max() >= most or len(ids.unique()) != count:
                    words = f"{file}: d2t must name {count} different ids below the model's {most}"
                    raise SettingsError(words, "MODEL")
                return asked.platform.accelerator.to_device(ids)
    raise SettingsError(f"{folder}: no tensor d2t says which ids of the model its {count} are", "MODEL")
