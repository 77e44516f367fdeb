"""ForwardBatch: the tensors of one step, as the decoder and the attention backends read them; StepCopy: the arrays that
one copy takes to a device, where they are derived (workers/platforms/tensor_rows.py).

Built by workers/rank/batch.py from a StepPlan and the rank's own row tables; read, and never changed, by workers/models
and workers/attention. T tokens of the step, R rows, S rows that sample, N blocks of the longest row.
"""

from dataclasses import dataclass, replace
from typing import Final, Generic, NamedTuple, TypeVar

import torch

from tandem.workers.kernels.lora_ops import AdapterRows
from tandem.workers.kernels.step_arrays import Array

T = TypeVar("T")


class GroupTable(NamedTuple):
    """slot_mapping_T and block_table_RN of a group of layers with block tables of its own."""

    slot_mapping_T: torch.Tensor
    block_table_RN: torch.Tensor


class StepShape(NamedTuple):
    """Facts of a step that its plan says on every rank of a stage alike. Nothing else decides whether it is replayed,
    and as which capture: a replay's collectives meet those of replays."""

    num_tokens: int
    most_queries: int  # of a row
    num_blocks: int  # of the longest row's table
    has_adapters: bool = False
    is_loaded: bool = True  # no overlapped load is waited for, layer by layer
    by_shards: bool = False  # its tokens can be drawn from parts of the vocabulary


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's inputs. Lists mirror the tensors for host-side loops (CPU attention), so that no sync is needed.

    input_ids_T, positions_T: int64. slot_mapping_T: int64, the slot of each token's KV, block id * block size + offset.
    query_starts: int32 [R + 1], row r's tokens are query_starts[r]:query_starts[r + 1]. seq_lens: int32 [R], known
    tokens whose KV exists after this step (a row's context is seq_lens[r], and its queries are the last ones).
    block_table_RN: int32, a short row padded with its own first block. Both are of group 0; further_groups: those of
    the others, in which blocks that no query sees any more are replaced by the row's first visible one. logits_rows_S:
    int64, indices into T of the logits to compute, in plan order. adapters: the adapter of each token, None without
    any; sample_adapters: the same for the rows S. spare_lens_list: drafts in flight may be rejected, so seq_lens_list
    says the most, and seq_lens may be less by so many at most; None: they are equal. A row's number of queries is
    always what the list says.

    real_T: bool, the tokens of a captured step that are no padding; None: of another step, which has none. A captured
    step's tensors change from replay to replay, and its lists say the fewest and the most queries of a row alone.
    """

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mapping_T: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table_RN: torch.Tensor
    logits_rows_S: torch.Tensor
    query_lens_list: list[int]
    seq_lens_list: list[int]
    block_size: int
    adapters: AdapterRows | None = None
    sample_adapters: AdapterRows | None = None
    spare_lens_list: list[int] | None = None
    further_groups: tuple[GroupTable, ...] = ()
    real_T: torch.Tensor | None = None

    @property
    def num_groups(self) -> int:
        """The number of groups of layers with block tables of their own."""
        return 1 + len(self.further_groups)

    def block_table(self, group: int) -> torch.Tensor:
        """Returns block_table_RN of a group of layers."""
        return self.further_groups[group - 1].block_table_RN if group else self.block_table_RN

    def of_group(self, group: int) -> "ForwardBatch":
        """Returns the batch as the layers of a group see it."""
        if not group:
            return self
        slot_mapping_T, block_table_RN = self.further_groups[group - 1]
        return replace(self, slot_mapping_T=slot_mapping_T, block_table_RN=block_table_RN)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids_T.shape[0])

    def without_first(self, blocks: list[int] | None, less_R: torch.Tensor, row_T: torch.Tensor) -> "ForwardBatch":
        """Returns the batch of rows whose texts begin so many blocks later: they see nothing ahead, and count positions
        from there. blocks: None in a capture; less_R: the same on the device; row_T: the row of each token."""
        places_RN = torch.arange(self.block_table_RN.shape[1], device=less_R.device) + less_R[:, None]
        places_RN.clamp_(max=places_RN.shape[1] - 1)  # of a short row its first block
        tables = (self.block_table(group).gather(1, places_RN) for group in range(self.num_groups))
        first_table_RN, *further = tables
        tokens_R, lens = less_R * self.block_size, self.seq_lens_list
        if blocks is not None:
            lens = [length - count * self.block_size for length, count in zip(lens, blocks, strict=True)]
        return replace(
            self,
            positions_T=self.positions_T - tokens_R[row_T],
            seq_lens=self.seq_lens - tokens_R.int(),
            seq_lens_list=lens,
            block_table_RN=first_table_RN,
            further_groups=tuple(
                group._replace(block_table_RN=table_RN)
                for group, table_RN in zip(self.further_groups, further, strict=True)
            ),
        )

    def shape(self, *, is_loaded: bool) -> StepShape:
        """Returns the step's shape. is_loaded: as there."""
        blocks, has_adapters = self.block_table_RN.shape[1], self.adapters is not None
        return StepShape(self.num_tokens, max(self.query_lens_list), blocks, has_adapters, is_loaded)


class StepCopy(NamedTuple, Generic[T]):
    """The arrays: on the host, and as tensors on the device. B rows that sample, Q rows with drafts, D drafts of a
    row."""

    ids_T: T  # the tokens that the host knows, negative for others
    place_T: T  # each token's row of the step
    rows_R: T
    back_R: T  # known tokens from the first that is computed on
    num_blocks_R: T
    logits_rows_S: T
    starts: T
    steps_T: T  # each token's place in its row
    lens_R: T
    count_rows: T  # rows with another count of known tokens than the device has
    counts: T
    block_places: T  # places of the flat table of blocks with another id than the device has
    blocks: T
    rows_B: T  # the rows that sample
    first_B: T  # the place of each one's first token among those sampled
    count_B: T  # how many it has
    slots_T: T | None = None  # adapters of the tokens
    slots_S: T | None = None  # adapters of those sampled
    behind_S: T | None = None  # the place of the draft behind each token that samples, -1 for none
    draft_T: T | None = None  # each token's place among the guesses [Q, D], -1 for one that is no draft
    factor_S: T | None = None  # of a draw, as in Draws; 0 where the best token is taken
    lowest_S: T | None = None
    top_k_S: T | None = None
    top_p_S: T | None = None
    seed_S: T | None = None
    choice_S: T | None = None
    repetition_S: T | None = None  # of its edits, as in LogitEdits
    frequency_S: T | None = None
    presence_S: T | None = None
    prompt_S: T | None = None
    place_E: T | None = None
    id_E: T | None = None
    until_E: T | None = None
    added_E: T | None = None
    rows_Q: T | None = None  # where the device guesses, the rows with drafts
    most_Q: T | None = None  # how many they have
    told_places: T | None = None  # places of the flat table of tokens that the device lacks
    told: T | None = None
    late_rows_B: T | None = None  # rows_B of a captured step that samples behind the capture, and so on
    late_first_B: T | None = None
    late_count_B: T | None = None
    most_S: T | None = None  # of a drafter's passes: the guesses of each row
    asked_S: T | None = None  # the row's place among those that were asked
    at_T: T | None = None  # the place of each token in the step before, below 0 where a row's last vector is kept
    skipped_R: T | None = None  # blocks that the drafter does not see


OnDevice = StepCopy[torch.Tensor]
StepFrame = tuple[torch.Tensor, OnDevice]
"""Memory of its own for the arrays of a captured step, as bytes and as what they are."""
CHANGES: Final = frozenset(
    {
        *("count_rows", "counts", "block_places", "blocks", "rows_Q", "most_Q", "told_places", "told"),
        *("late_rows_B", "late_first_B", "late_count_B"),
    }
)
"""Arrays as long as what has changed. The others have a place of their own in a captured step."""


def framed_first(copy: StepCopy[Array]) -> list[tuple[str, Array]]:
    """Returns the arrays that there are, by name, in the order of the copy: the changes come last."""
    named = [(name, array) for name, array in copy._asdict().items() if array is not None]
    return sorted(named, key=lambda one: one[0] in CHANGES)
