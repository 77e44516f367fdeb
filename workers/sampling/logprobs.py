"""Log probabilities of chosen and best tokens, from the model's own logits before any adjustment.

Called by sampler.py; the same choice as vLLM's `raw_logprobs`. L rows that want them, V vocabulary, N tokens
that rows name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from tandem.workers.kernels.sampling_rules import MOST_TOP
from tandem.workers.messages.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-softmax of some rows' raw logits and their best ids, kept from before the logits are changed in place."""

    logprobs_LV: torch.Tensor
    wanted: list[int]

    @classmethod
    def of(cls, logits_LV: torch.Tensor, wanted: list[int]) -> "RawLogprobs":
        """logits_LV: float32, one row per entry of `wanted`, which counts the best tokens to report (0: none)."""
        return cls(torch.log_softmax(logits_LV, dim=-1), wanted)

    def of_tokens(
        self,
        chosen_L: torch.Tensor,
        to_host: Callable[[torch.Tensor], torch.Tensor],
        named_LN: torch.Tensor | None = None,
        named_ids: Sequence[Sequence[int]] = (),
    ) -> "ChosenLogprobs":
        """Looks up the chosen ids (int64 [L]), the best ones, and those that rows name, of which named_LN has the ids
        and zeros; to_host copies to host memory, maybe later."""
        most = min(max(self.wanted, default=0), self.logprobs_LV.shape[1])
        chosen_L1 = self.logprobs_LV.gather(1, chosen_L[:, None])
        top_LM, top_ids_LM = best_of(self.logprobs_LV, most) if most else (chosen_L1[:, :0], chosen_L[:, None][:, :0])
        better_L = (self.logprobs_LV > chosen_L1).sum(dim=1, dtype=torch.int32)
        ranked_2L = torch.stack((chosen_L, 1 + better_L))  # of one type, for one copy
        named = None if named_LN is None else NamedLogprobs(named_ids, to_host(self.logprobs_LV.gather(1, named_LN)))
        return ChosenLogprobs(
            to_host(ranked_2L),
            to_host(chosen_L1),
            to_host(top_ids_LM),
            to_host(top_LM),
            self.wanted,
            named,
        )


def best_of(logprobs_LV: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `most` best log probabilities of each row, in descending order, and their ids (int64), both [L, most].

    Of equal ones, which 16-bit logits have many of, those of lower ids come first. torch.topk alone orders and chooses
    them by `most` too, which rows of other requests decide.
    """
    top_LM, ids_LM = logprobs_LV.topk(most, dim=1)
    last_L1 = top_LM[:, -1:]
    # Of those as good as the last one, some may be left out: they are taken in the order of their ids.
    keys_V = torch.arange(0, -logprobs_LV.shape[1], -1, dtype=torch.float32, device=logprobs_LV.device)
    lowest_LM = torch.where(logprobs_LV == last_L1, keys_V, -torch.inf).topk(most, dim=1).indices
    is_last_LM = top_LM == last_L1
    place_LM = (is_last_LM.cumsum(dim=1) - 1).clamp(min=0)
    ids_LM = torch.where(is_last_LM, lowest_LM.gather(1, place_LM), ids_LM).sort(dim=1).values
    top_LM, order_LM = logprobs_LV.gather(1, ids_LM).sort(dim=1, descending=True, stable=True)
    return top_LM, ids_LM.gather(1, order_LM)


@dataclass(frozen=True, slots=True)
class NamedLogprobs:
    """The ids that each row names, in its order, and on the host their log probabilities, which are the first ones of
    each row."""

    ids: Sequence[Sequence[int]]
    logprobs_LN: torch.Tensor

    def tops(self) -> list[list[tuple[int, float]]]:
        """Each row's ids and log probabilities."""
        rows = zip(self.ids, self.logprobs_LN.tolist(), strict=True)
        return [list(zip(ids, values, strict=False)) for ids, values in rows]


@dataclass(frozen=True, slots=True)
class ChosenLogprobs:
    """Host tensors with the chosen ids and their ranks, their log probabilities, and the best ids and theirs, in
    descending order; and those that rows name in their place."""

    ranked_2L: torch.Tensor
    logprobs_L1: torch.Tensor
    top_ids_LM: torch.Tensor
    top_LM: torch.Tensor
    wanted: list[int]
    named: NamedLogprobs | None = None

    def entries(self) -> list[TokenLogprobs]:
        """One TokenLogprobs per row; `top` in descending order, or as named."""
        columns = (*self.ranked_2L, self.logprobs_L1[:, 0], self.top_ids_LM, self.top_LM)
        rows = zip(*(column.tolist() for column in columns), self.wanted, strict=True)
        found = [
            TokenLogprobs(token, logprob, list(zip(ids[:count], values[:count], strict=True)), rank)
            for token, rank, logprob, ids, values, count in rows
        ]
        if self.named is None:
            return found
        return [msgspec.structs.replace(x, top=x.top or top) for x, top in zip(found, self.named.tops(), strict=True)]


@dataclass(frozen=True, slots=True)
class ReportedLogprobs:
    """The log probabilities that a capture reports (kernels/sampling_rules.py), on the host, int32 [S, REPORT]. wanted:
    by place, of those that ask, how many of the best tokens, or which ids in their place."""

    report_SX: torch.Tensor
    wanted: Mapping[int, int | list[int]]

    def entries(self, ids_S: Sequence[int]) -> list[tuple[int, TokenLogprobs]]:
        """Returns one for each place that asks. ids_S: the chosen tokens."""
        ranks, values = self.report_SX, self.report_SX.view(torch.float32)
        found = []
        for place, asked in sorted(self.wanted.items()):
            count = asked if isinstance(asked, int) else len(asked)
            named = ranks[place, 2 : 2 + count].tolist() if isinstance(asked, int) else asked
            top = list(zip(named, values[place, 2 + MOST_TOP : 2 + MOST_TOP + count].tolist(), strict=True))
            found.append((place, TokenLogprobs(ids_S[place], float(values[place, 1]), top, int(ranks[place, 0]))))
        return found
