"""Platforms of tests: one whose methods are replaced, and a GPU's on the host's memory, with twins of Triton's kernels
that a recorded graph holds."""

from collections.abc import Hashable
from copy import copy
from typing import TypeVar

import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.parallel.groups import GLOO
from tandem.workers.attention.backend import AttentionBackend
from tandem.workers.attention.forward_batch import StepShape
from tandem.workers.attention.torch_sdpa import TorchAttention
from tandem.workers.graphs.cuda_graphs import CaptureGraph
from tandem.workers.graphs.graph_runner import Body, I, Outputs
from tandem.workers.kernels.kv_store import LayerKV
from tandem.workers.kernels.logit_edits import LogitEdits, RowTokens
from tandem.workers.kernels.sampling_ops import (
    RandomRows,
    SamplingOps,
    TorchSampling,
    exponents,
    kth_greatest,
    nucleus_edge,
)
from tandem.workers.platforms.base import DeviceMemory, Platform
from tandem.workers.platforms.cuda import CudaPlatform
from tandem.workers.sampling.processors.penalties import penalize

P = TypeVar("P", bound=Platform)


def replaced(platform: P, **members: object) -> P:
    """Return a copy of a platform with other methods or attributes."""
    made = copy(platform)
    vars(made).update(members)
    return made


class AnySteps(TorchAttention):
    """Captures steps with chunks too: their tokens attend one by one, each to all blocks that its row may have."""

    def replay_key(self, shape: StepShape, kv: LayerKV, dtype: torch.dtype) -> Hashable | None:
        return super().replay_key(shape._replace(most_queries=1), kv, dtype)


class FixedTwin(TorchSampling):
    """Draws for any mix of rows by one sequence of calls: every row is searched, and those without a limit keep what
    they had."""

    def edit_all(
        self,
        logits_SV: torch.Tensor,
        tokens: RowTokens,
        edits: LogitEdits[torch.Tensor],
        counts_SV: torch.Tensor,
    ) -> None:
        """Entries that are none change a row that is not there."""
        assert not counts_SV.requires_grad and counts_SV.shape == logits_SV.shape
        places, vocab = logits_SV.shape
        place_E, id_E = torch.where(edits.place_E < 0, places, edits.place_E.long()), edits.id_E.long()
        added, until = logits_SV.new_zeros(places + 1, vocab), edits.until_E.new_zeros(places + 1, vocab)
        added[place_E, id_E], until[place_E, id_E] = edits.added_E, edits.until_E
        forbidden_SV = tokens.positions_S[:, None] < until[:-1]
        logits_SV.copy_(torch.where(forbidden_SV, float("-inf"), logits_SV + added[:-1]))
        penalties = (column[:, None] for column in (edits.repetition_S, edits.frequency_S, edits.presence_S))
        tokens_SL, ends_S1 = tokens.tokens_NL[tokens.rows_S].long(), tokens.positions_S[:, None]
        penalize(logits_SV, tokens_SL, edits.prompt_S[:, None], ends_S1, *penalties)

    def choose_all(
        self,
        logits_SV: torch.Tensor,
        best_S: torch.Tensor,
        ids_S: torch.Tensor,
        positions_S: torch.Tensor,
        rows: RandomRows,
    ) -> None:
        lowest_S, top_k_S, top_p_S = rows.lowest(), rows.top_k(), rows.top_p()
        scores_SV = exponents(logits_SV, best_S, rows.at(), rows.factor())
        kth_S = kth_greatest(scores_SV, top_k_S.double())
        lowest_S = torch.where(top_k_S > 0, torch.maximum(lowest_S, kth_S), lowest_S)
        lowest_S = torch.where(top_p_S < 1, nucleus_edge(scores_SV, lowest_S, top_p_S), lowest_S)
        self.choose(logits_SV, best_S, ids_S, positions_S, rows, lowest_S)


class GpuOnHost(CudaPlatform):
    """The platform of ranks on a GPU, whose accelerator and memory are the host's; Triton, which needs a device, gives
    way to twins."""

    def __init__(self, accelerator: Accelerator, capture: CaptureGraph | None = None) -> None:
        super().__init__(torch.device("cpu"), accelerator, GLOO, capture)

    def has_triton(self) -> bool:
        return False

    def attention(self, dtype: torch.dtype, head_dim: int, kv_dtype: torch.dtype | None = None) -> AttentionBackend:
        if self.has_triton():
            return super().attention(dtype, head_dim, kv_dtype)
        return AnySteps(is_bounded=True, replays=True)

    def sampling_ops(self) -> SamplingOps:
        return super().sampling_ops() if self.has_triton() else FixedTwin()

    def memory(self) -> DeviceMemory | None:
        return DeviceMemory(0, 0)


class NoGraphs:
    """Runs every step eagerly."""

    can_replay = False
    num_replays = 0

    def run(self, key: Hashable | None, inputs: I, body: Body[I]) -> Outputs:
        return body(inputs)

    def begin_layer(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
