"""FramedStep: a whole step for a graph to hold, from the arrays of its copy to the tokens that it samples.

In a graph: what rows have become is derived, the model computes, and where one sequence of calls serves all rows
(SamplingTable.captured) logits are edited, tokens are drawn and, on a rank that is a group of its own, added to their
rows. So a step is one copy to the device, one replay, and one copy back. Other steps sample, or add, behind the replay.
Made by rank/start/captures.py; filled by batch.py, replayed by model_runner.py. T tokens, S tokens that are sampled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tandem.workers.attention.backend import DECODE_QUERIES, KVTensors
from tandem.workers.attention.forward_batch import ForwardBatch, OnDevice
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.kernels.logit_edits import LogitEdits, RowTokens
from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.kernels.sampling_ops import FixedSampling, RandomRows
from tandem.workers.kernels.step_arrays import StepArrays, arrived
from tandem.workers.models.decoder import Decoder
from tandem.workers.models.step_tensors import StepRoom
from tandem.workers.planning.graph_room import CaptureSize
from tandem.workers.platforms.device_rows import NO_PLACE, NOT_FINITE_ID, FramedRows, StepRows, StepTensors
from tandem.workers.rank.captured.frame import Frame, PaddingRows, with_room
from tandem.workers.rank.captured.shard_draw import ShardDraw
from tandem.workers.sampling.sampling_table import CapturedSampling

Clear = Callable[[torch.Tensor], None]
"""Zeroes slots of the cache."""


class ReplayOutcome(NamedTuple):
    """The results of a captured step beside StepRoom; empty where there is none. sampled_XS:
    int64, in rows the ids, the bits of the greatest logits, and drafts_S. slots_GS: the cache's, of each group of
    layers."""

    positions_T: torch.Tensor
    positions_S: torch.Tensor  # of the tokens that are sampled
    slots_GS: torch.Tensor
    drafts_S: torch.Tensor
    sampled_XS: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts that the captures of a rank share. memory: of frames. ops: None where tokens are not drawn in them.
    shards: what draws by shards, where captures do.
    tokens_NL: of the rows, for its edits, as counts_SV. samples: on this rank. adds: this rank is a group of its
    own."""

    decoder: Decoder
    kv: KVTensors
    clear: Clear
    rows: FramedRows
    spare: PaddingRows
    room: StepRoom
    memory: torch.Tensor
    ops: FixedSampling | None
    shards: ShardDraw | None
    tokens_NL: torch.Tensor
    counts_SV: torch.Tensor
    samples: bool
    adds: bool
    max_drafts: int


class FramedStep:
    """A StaticStep."""

    def __init__(self, parts: StepParts, size: CaptureSize) -> None:
        self._parts = parts
        self.size = size
        self.frame = Frame(size, parts.spare, parts.memory, drafts=parts.max_drafts > 0)

    @property
    def num_tokens(self) -> int:
        return self.size.num_tokens

    @property
    def num_samples(self) -> int:
        return self.size.num_samples

    @property
    def by_shards(self) -> bool:
        return self.size.by_shards

    @property
    def room(self) -> StepRoom:
        return self._parts.room

    @property
    def ops(self) -> FixedSampling | None:
        return self._parts.ops

    @property
    def draws(self) -> bool:
        """True if it draws the tokens of rows that one sequence of calls serves."""
        return self.ops is not None

    @property
    def adds(self) -> bool:
        """True if it adds those that it draws to their rows."""
        return self.draws and self._parts.adds

    def pad(self) -> None:
        self.frame.pad()
        self.room.residual_TH.zero_()

    def fill(self, rows: StepRows, sampling: CapturedSampling | None, beside: StepArrays) -> None:
        """Brings a step to the device, with the arrays of its other parts. sampling: of its tokens, where it draws."""
        parts = self._parts
        packed = parts.rows.pack(rows)
        is_added = sampling is not None and parts.adds
        framed = with_room(packed, self.size, parts.spare, sampling, drafts=parts.max_drafts > 0)
        if sampling is not None and not is_added:
            framed = framed._replace(
                late_rows_B=packed.rows_B, late_first_B=packed.first_B, late_count_B=packed.count_B
            )
        sent = parts.rows.send(rows, framed, beside, self.frame.inner)
        if sent.late_rows_B is not None and sent.late_first_B is not None and sent.late_count_B is not None:
            sent = sent._replace(rows_B=sent.late_rows_B, first_B=sent.late_first_B, count_B=sent.late_count_B)
        self._samples = np.asarray(packed.rows_B, np.int64), sent, int(packed.count_B.max(initial=1)) - 1
        parts.rows.expect(*self._samples, None)

    def expect_drafts(self, drafts_S: torch.Tensor) -> None:
        """Says which drafts a step that adds behind the replay has."""
        self._parts.rows.expect(*self._samples, drafts_S)

    def run(self) -> Outputs:
        parts, sent = self._parts, self.frame.arrays
        notes = parts.samples and parts.max_drafts > 0
        tensors = parts.rows.derived(sent, self.size.num_blocks, notes=notes)
        batch = self._batch(tensors, sent.rows_R[sent.place_T] != parts.spare.read)
        parts.decoder.forward_into(batch, parts.kv, parts.room, by_shards=self.size.by_shards)
        positions_S = batch.positions_T[batch.logits_rows_S] + 1
        slots_GS = torch.stack(
            [batch.of_group(group).slot_mapping_T[batch.logits_rows_S] for group in range(batch.num_groups)]
        )
        drafts_S = positions_S[:0] if tensors.drafts_S is None else tensors.drafts_S
        sampled_XS = positions_S[:0]
        if self.size.by_shards:
            sampled_XS = self._sampled_by_shards(positions_S, slots_GS, drafts_S)
        elif parts.ops is not None:
            sampled_XS = self._sampled(parts.ops, positions_S, slots_GS, drafts_S)
        return ReplayOutcome(batch.positions_T, positions_S, slots_GS, drafts_S, sampled_XS)

    def _batch(self, tensors: StepTensors, real_T: torch.Tensor) -> ForwardBatch:
        adapters = sample_adapters = None
        if tensors.slots_T is not None and tensors.slots_S is not None:
            adapters, sample_adapters = AdapterRows(tensors.slots_T, []), AdapterRows(tensors.slots_S, [])
        bounds = [1, DECODE_QUERIES + 1] if self.size.has_chunks else [1]
        size, more = self._parts.kv.block_size, {"adapters": adapters, "sample_adapters": sample_adapters}
        return tensors.batch(bounds, bounds, size, **more, real_T=real_T)

    def _sampled(
        self, ops: FixedSampling, positions_S: torch.Tensor, slots_GS: torch.Tensor, drafts_S: torch.Tensor
    ) -> torch.Tensor:
        """Edits the logits, draws, and adds the tokens where this rank is a group of its own."""
        parts, sent = self._parts, self.frame.arrays
        logits_SV = parts.room.logits_SV[: self.num_samples]
        tokens = RowTokens(parts.tokens_NL, sent.rows_R[sent.place_T[sent.logits_rows_S]], positions_S)
        ops.edit_all(logits_SV, tokens, row_edits(sent), parts.counts_SV[: self.num_samples])
        best_S, ids_S = ops.best(logits_SV)
        ops.choose_all(logits_SV, best_S, ids_S, positions_S, random_rows(sent, self.num_samples, ids_S.device))
        return packed_draws(parts, sent, ids_S, best_S, slots_GS, drafts_S)

    def _sampled_by_shards(
        self, positions_S: torch.Tensor, slots_GS: torch.Tensor, drafts_S: torch.Tensor
    ) -> torch.Tensor:
        """Draws on all ranks of the stage."""
        parts, sent = self._parts, self.frame.arrays
        assert parts.shards is not None
        part_SV = parts.decoder.part_of(parts.room.logits_SV[: self.num_samples])
        rows = random_rows(sent, self.num_samples, part_SV.device)
        best_S, ids_S = parts.shards.draw(part_SV, positions_S, rows)
        return packed_draws(parts, sent, ids_S, best_S, slots_GS, drafts_S)


def packed_draws(
    parts: StepParts,
    sent: OnDevice,
    ids_S: torch.Tensor,
    best_S: torch.Tensor,
    slots_GS: torch.Tensor,
    drafts_S: torch.Tensor,
) -> torch.Tensor:
    """Returns sampled_XS of what was drawn; adds the tokens where this rank is a group of its own. drafts_S: empty
    where there are none."""
    has_drafts = len(drafts_S) > 0
    if has_drafts:
        ids_S = torch.where(torch.isfinite(best_S), ids_S, NOT_FINITE_ID)
    sampled_XS = ids_S.new_zeros((2 + has_drafts, len(ids_S)))
    sampled_XS[0] = ids_S
    sampled_XS[1].view(torch.float32)[: len(ids_S)] = best_S
    if has_drafts:
        sampled_XS[2] = drafts_S
    if parts.adds:
        if has_drafts:
            clean_rejected(parts.clear, slots_GS, ids_S, drafts_S, parts.kv)
        parts.rows.add(sent, parts.max_drafts, drafts_S if has_drafts else None, ids_S)
    return sampled_XS


def row_edits(sent: OnDevice) -> LogitEdits[torch.Tensor]:
    """Returns the edits of all logits."""
    arrays = sent._asdict()
    return LogitEdits[torch.Tensor](*(arrays[name] for name in LogitEdits._fields))


def random_rows(sent: OnDevice, count: int, device: torch.device) -> RandomRows:
    """Returns the parameters of all tokens that are sampled."""
    columns = (sent.factor_S, sent.lowest_S, sent.top_k_S, sent.top_p_S, sent.seed_S, sent.choice_S)
    there = [torch.arange(count, device=device), *(column for column in columns if column is not None)]
    return RandomRows(*map(arrived, there))


def clean_rejected(
    clear: Clear, slots_GS: torch.Tensor, ids_S: torch.Tensor, drafts_S: torch.Tensor, kv: KVTensors
) -> None:
    """Zeroes the KV of drafts whose logits are not finite, on a device: attention may read what it then weighs with
    0. A row that has accepted such a draft ends."""
    is_bad_S = ids_S == NOT_FINITE_ID
    is_bad_S[1:] &= drafts_S[:-1] != NO_PLACE
    is_bad_S[:1].fill_(False)  # as all those behind NO_PLACE: a known token
    for slots_S in slots_GS.unbind():
        clear(torch.where(is_bad_S, slots_S, kv.scratch_block * kv.block_size))
