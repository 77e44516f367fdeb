"""ForwardBatch: the tensors of one step, as the decoder and the attention backends read them.

Built by workers/rank/batch.py from a StepPlan and the rank's own row tables; read, and never changed, by workers/models
and workers/attention. T tokens of the step, R rows, S rows that sample, N blocks of the longest row.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tandem.workers.kernels.lora_ops import AdapterRows


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

    def shape(self, *, is_loaded: bool) -> StepShape:
        """Returns the step's shape. is_loaded: as there."""
        blocks, has_adapters = self.block_table_RN.shape[1], self.adapters is not None
        return StepShape(self.num_tokens, max(self.query_lens_list), blocks, has_adapters, is_loaded)
