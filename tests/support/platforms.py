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
from tandem.workers.kernels.sampling_rules import (
    HEADER,
    MARK_TOKENS,
    MASK,
    MOST_TOP,
    MOST_WORDS,
    NAMED,
    PREFERENCE,
    REPORT,
    SPAN,
    THINKING,
    WORD_SIZE,
    WORD_TOKENS,
    WORDS,
    SamplingRules,
)
from tandem.workers.platforms.base import DeviceMemory, Platform
from tandem.workers.platforms.cuda import CudaPlatform
from tandem.workers.sampling.logprobs import best_of
from tandem.workers.sampling.processors.penalties import penalize
from tandem.workers.sampling.processors.thinking_budget import DeviceSpans

MOST_UNREAD, MARK = 8, 4
"""Tokens of a row that the host has not read, and of a mark of thinking, at most."""
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
        rules: SamplingRules[torch.Tensor] | None = None,
    ) -> None:
        """Entries that are none change a row that is not there."""
        assert not counts_SV.requires_grad and counts_SV.shape == logits_SV.shape
        places, vocab = logits_SV.shape
        place_E, id_E = torch.where(edits.place_E < 0, places, edits.place_E.long()), edits.id_E.long()
        added, until = logits_SV.new_zeros(places + 1, vocab), edits.until_E.new_zeros(places + 1, vocab)
        added[place_E, id_E], until[place_E, id_E] = edits.added_E, edits.until_E
        forbidden_SV = tokens.positions_S[:, None] < until[:-1]
        logits_SV.copy_(torch.where(forbidden_SV, float("-inf"), logits_SV + added[:-1]))
        if rules is not None:
            logits_SV.copy_(ruled(logits_SV, tokens, edits.prompt_S, rules))
        penalties = (column[:, None] for column in (edits.repetition_S, edits.frequency_S, edits.presence_S))
        tokens_SL, ends_S1 = tokens.tokens_NL[tokens.rows_S].long(), tokens.positions_S[:, None]
        penalize(logits_SV, tokens_SL, edits.prompt_S[:, None], ends_S1, *penalties)

    def keep_logits(
        self, logits_SV: torch.Tensor, rules: SamplingRules[torch.Tensor], kept_MV: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (torch.log_softmax(logits_SV, 1),)

    def report(
        self,
        logits_SV: torch.Tensor,
        ids_S: torch.Tensor,
        rules: SamplingRules[torch.Tensor],
        kept_MV: torch.Tensor,
        noted: tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Of every place as many best tokens as there may be, or those that it names."""
        (logprobs_SV,) = noted
        chosen_S1, most = logprobs_SV.gather(1, ids_S.clamp(min=0)[:, None]), min(MOST_TOP, logprobs_SV.shape[1])
        top_SM, top_ids_SM = best_of(logprobs_SV, most)
        header_SH = at(rules.numbers_I, rules.begin_S, HEADER)
        named_SN = at(rules.numbers_I, header_SH[:, NAMED], 1 + MOST_TOP)[:, 1 : 1 + most].long()
        named_SN = logprobs_SV.gather(1, named_SN.clamp(0, logprobs_SV.shape[1] - 1))
        report_SX = logprobs_SV.new_zeros((len(ids_S), REPORT))
        report_SX[:, 1:2] = chosen_S1
        report_SX[:, 2 + MOST_TOP : 2 + MOST_TOP + most] = torch.where(header_SH[:, NAMED, None] >= 0, named_SN, top_SM)
        found_SX = report_SX.view(torch.int32)
        found_SX[:, 0] = 1 + (logprobs_SV > chosen_S1).sum(1)
        found_SX[:, 2 : 2 + most] = top_ids_SM.int()
        return found_SX

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


def at(numbers_I: torch.Tensor, begin_S: torch.Tensor, count: int) -> torch.Tensor:
    """So many numbers of each place from where they begin; -1 where nothing begins."""
    at_SC = begin_S.long()[:, None] + torch.arange(count, device=begin_S.device)
    return torch.where(begin_S[:, None] >= 0, numbers_I[at_SC.clamp(0, len(numbers_I) - 1)], -1)


def ruled(
    logits_SV: torch.Tensor, tokens: RowTokens, prompt_S: torch.Tensor, rules: SamplingRules[torch.Tensor]
) -> torch.Tensor:
    """The logits of places with rules, by operations of shapes that do not depend on what they are."""
    numbers_I, positions_S, vocab = rules.numbers_I, tokens.positions_S, logits_SV.shape[1]
    header_SH = at(numbers_I, rules.begin_S, HEADER)
    own_SL = tokens.tokens_NL[tokens.rows_S]
    span_SC = at(numbers_I, header_SH[:, THINKING], SPAN + 2 * MARK_TOKENS).long()
    span_SC = torch.cat((span_SC[:, : SPAN + MARK], span_SC[:, SPAN + MARK_TOKENS :][:, :MARK]), 1)
    spans = DeviceSpans(
        lambda columns_SK: own_SL.gather(1, columns_SK.clamp(0, own_SL.shape[1] - 1)), positions_S, span_SC
    )
    for _ in range(MOST_UNREAD):
        spans.read_on()
    is_over_S, id_S = spans.preferred()
    added_SV = torch.zeros_like(logits_SV).scatter_(
        1, id_S.clamp(min=0)[:, None], torch.where(is_over_S & (header_SH[:, THINKING] >= 0), PREFERENCE, 0.0)[:, None]
    )
    changed_SV = torch.where(added_SV > 0, logits_SV + added_SV, logits_SV)
    words_S = header_SH[:, WORDS]
    count_S1 = at(numbers_I, words_S, 1)
    words_SWC = at(numbers_I, words_S, 1 + MOST_WORDS * WORD_SIZE)[:, 1:].long().unflatten(1, (MOST_WORDS, WORD_SIZE))
    back_K, place_W = torch.arange(WORD_TOKENS), torch.arange(MOST_WORDS)
    columns_SK = positions_S[:, None] - 1 - back_K
    before_SK = own_SL.gather(1, columns_SK.clamp(0, own_SL.shape[1] - 1))
    same_SWK = (before_SK[:, None] == words_SWC[..., 2:]) & (columns_SK >= prompt_S[:, None])[:, None]
    found_SW = (same_SWK | (back_K >= words_SWC[..., 1, None])).all(2) & (place_W < count_S1)
    last_SW = words_SWC[..., 0].clamp(0, vocab - 1)
    forbidden_SV = torch.zeros_like(logits_SV).scatter_add_(1, last_SW, found_SW.float()) > 0
    masks_SW = at(numbers_I, header_SH[:, MASK], -(-vocab // 32))
    kept_SV = ((masks_SW[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1).bool().flatten(1)[:, :vocab]
    return torch.where(forbidden_SV | ~kept_SV, float("-inf"), changed_SV)


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
