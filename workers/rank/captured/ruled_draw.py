"""RuledDraw: the choice of a step's tokens as a graph of its own, behind the step's, where some row has rules.

Masks, bad words of several tokens, budgets of thinking and log probabilities (kernels/sampling_rules.py) are rare, and
the masks of grammars are made on the host while the device computes the step. So a step with such rows is two replays:
its own one, up to the logits, and this one. All others pay nothing. RuledSampling is one step's use of it. Captured by
rank/start/captures.py, chosen by batch.py, run by model_runner.py. S tokens that are sampled, I integers, G groups of
layers, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.forward_batch import OnDevice
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.kernels.logit_edits import RowTokens
from tandem.workers.kernels.sampling_ops import FixedSampling
from tandem.workers.kernels.sampling_rules import REPORT, ReportOps, SamplingRules, free_ends
from tandem.workers.kernels.step_arrays import Array, Send, Sent
from tandem.workers.planning.graph_room import MOST_KEPT, draw_bytes, most_edits, most_numbers
from tandem.workers.platforms.step_buffer import places_of, views_of
from tandem.workers.rank.captured.frame import NEEDED, sampling_arrays
from tandem.workers.rank.captured.framed_step import ReplayOutcome, StepParts, packed_draws, random_rows, row_edits
from tandem.workers.sampling.logprobs import ReportedLogprobs
from tandem.workers.sampling.processors.logits_processor import History, SampledRows
from tandem.workers.sampling.sampler import Drawn
from tandem.workers.sampling.sampling_table import EDITS, CapturedSampling, SamplingTable
from tandem.workers.sampling.step_rules import StepRules

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DrawMemory:
    """Memory that all of a rank's share: for arrays, as bytes; what the step's capture has left of its places; logits
    that are kept."""

    arrays: torch.Tensor
    positions_S: torch.Tensor
    slots_GS: torch.Tensor
    drafts_S: torch.Tensor
    kept_MV: torch.Tensor


class RuledDraw:
    """The static part: room for num_samples tokens. drawn: by ops of `parts`, which report too."""

    def __init__(self, parts: StepParts, num_samples: int, memory: DrawMemory) -> None:
        self._parts = parts
        self._memory = memory
        self.num_samples = num_samples
        self.most_edits = most_edits(num_samples)
        self._most_numbers = most_numbers(num_samples, parts.room.logits_SV.shape[1])
        named = self._named(None, np.empty(0, np.int64), np.empty(0, np.int32))
        self._names, arrays = [name for name, _ in named], [array for _, array in named]
        self._fixed_bytes = places_of(arrays)[1]
        views = dict(zip(self._names, views_of(memory.arrays, arrays), strict=True))
        numbers_I = memory.arrays[self._fixed_bytes :][: 4 * self._most_numbers].view(torch.int32)
        self._rows_S, self._rules = views.pop("table_rows_S"), SamplingRules(views.pop("begin_S"), numbers_I)
        self._sent = OnDevice(**{**dict.fromkeys(NEEDED, memory.arrays[:0]), **views})

    def has_room(self, rules: StepRules) -> bool:
        return len(rules.numbers_I) <= self._most_numbers and rules.num_kept <= len(self._memory.kept_MV)

    def packed(self, sampling: CapturedSampling, rows_S: Ints, rules: StepRules) -> npt.NDArray[np.int64]:
        """Returns a step's arrays one behind the other, the rules last."""
        named = self._named(sampling, rows_S, rules.begin_S)
        arrays: list[Array] = [*(array for _, array in named), rules.numbers_I]
        starts, size = places_of(arrays)
        whole = np.zeros(size, np.uint8)
        for array, start in zip(arrays, starts, strict=True):
            whole[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return whole.view(np.int64)

    def fill(self, packed: torch.Tensor, outcome: ReplayOutcome) -> None:
        """Brings a step's arrays where the capture reads them, and what the step's capture has left, which samples as
        many tokens."""
        memory = self._memory
        memory.arrays[: packed.nbytes].copy_(packed.view(torch.uint8))
        memory.positions_S[: self.num_samples] = outcome.positions_S
        if self._parts.max_drafts:
            memory.drafts_S[: self.num_samples] = outcome.drafts_S
            memory.slots_GS[:, : self.num_samples] = outcome.slots_GS

    def pad(self) -> None:
        named = self._named(None, np.empty(0, np.int64), np.empty(0, np.int32))
        for view, (_, array) in zip(views_of(self._memory.arrays, [of for _, of in named]), named, strict=True):
            view.copy_(torch.from_numpy(array))
        self._rules.numbers_I.fill_(-1)

    def run(self) -> Outputs:
        """Returns what is copied to the host as one, int64: sampled_XS of ReplayOutcome, then the reports [S,
        REPORT]."""
        parts, count, sent, memory = self._parts, self.num_samples, self._sent, self._memory
        ops = parts.ops
        assert ops is not None and isinstance(ops, ReportOps)
        logits_SV, positions_S = parts.room.logits_SV[:count], memory.positions_S[:count]
        noted = ops.keep_logits(logits_SV, self._rules, memory.kept_MV)
        tokens = RowTokens(parts.tokens_NL, self._rows_S, positions_S)
        ops.edit_all(logits_SV, tokens, row_edits(sent), parts.counts_SV[:count], self._rules)
        best_S, ids_S = free_ends(logits_SV, *ops.best(logits_SV), self._rules)
        ops.choose_all(logits_SV, best_S, ids_S, positions_S, random_rows(sent, count, ids_S.device))
        report_SX = ops.report(logits_SV, ids_S, self._rules, memory.kept_MV, noted)
        drafts_S = memory.drafts_S[: count if parts.max_drafts else 0]
        sampled_XS = packed_draws(parts, sent, ids_S, best_S, memory.slots_GS[:, :count], drafts_S)
        return (torch.cat((sampled_XS.flatten(), report_SX.view(torch.int64).flatten())),)

    def _named(
        self, sampling: CapturedSampling | None, rows_S: Ints, begin_S: npt.NDArray[np.int32]
    ) -> list[tuple[str, Any]]:
        """Returns the arrays by name, with padding behind a step's own."""
        count, spare = self.num_samples, self._parts.spare
        rows, begins = np.full(count, spare.read, np.int64), np.full(count, -1, np.int32)
        rows[: len(rows_S)], begins[: len(begin_S)] = rows_S, begin_S
        rows_B, first_B, count_B = np.full(count, spare.written), np.zeros(count, np.int64), np.ones(count, np.int64)
        if self._parts.adds:
            firsts = np.flatnonzero(np.diff(rows_S, prepend=-1))
            own = slice(len(firsts))
            rows_B[own], first_B[own], count_B[own] = rows_S[firsts], firsts, np.diff(firsts, append=len(rows_S))
        held = {"table_rows_S": rows, "begin_S": begins, "rows_B": rows_B, "first_B": first_B, "count_B": count_B}
        return [*held.items(), *sampling_arrays(sampling, count, self.most_edits).items()]


@dataclass(frozen=True, slots=True)
class DrawReplay:
    """A captured RuledDraw. outputs: what run() has returned, with each replay's values."""

    draw: RuledDraw
    replay: Any
    outputs: Outputs


class RuledPlaces(NamedTuple):
    """The places of a step, int64 [S], with the arguments of Sampling; read_S: the tokens of each row that the host has
    read."""

    rows_S: Ints
    positions_S: Ints
    prompt_len_S: Ints
    read_S: Ints
    history: History


class RuledSampling:
    """The choice of one step's tokens, from arrays that are sent with the step's, but for masks of grammars."""

    def __init__(
        self,
        captured: DrawReplay,
        table: SamplingTable,
        ops: FixedSampling,
        places: RuledPlaces,
        sampling: CapturedSampling,
        rules: StepRules,
    ) -> None:
        self._captured, self._table, self._ops, self._places = captured, table, ops, places
        self._sampling, self._rules = sampling, rules
        self._packed: Sent | None = None

    @property
    def read_rows(self) -> Ints | None:
        return self._sampling.read_rows

    @property
    def prepares_late(self) -> bool:
        """True if prepare() waits for the tokens of all steps before: some row has a grammar."""
        return bool(self._rules.masks)

    def prepare(self, send: Send) -> None:
        """Sends the arrays."""
        if self._rules.masks:
            self._mask(send)
        self._packed = send(self._captured.draw.packed(self._sampling, self._places.rows_S, self._rules))

    def draw(self, outcome: ReplayOutcome, to_host: Callable[[torch.Tensor], torch.Tensor]) -> Drawn:
        """Replays the choice behind the step's replay. to_host: copies to the host, maybe later; called once."""
        assert self._packed is not None
        draw, (flat,) = self._captured.draw, self._captured.outputs
        draw.fill(self._packed(), outcome)
        self._captured.replay()
        size, reported = len(flat) - draw.num_samples * (REPORT // 2), None
        host = to_host(flat if self._rules.wanted else flat[:size])
        if self._rules.wanted:
            reported = ReportedLogprobs(host[size:].view(torch.int32).view(-1, REPORT), self._rules.wanted)
        edited_S = self._table.flags[self._places.rows_S] & EDITS > 0
        shape = (size // draw.num_samples, draw.num_samples)
        return Drawn.captured(flat[:size].view(shape), host[:size].view(shape), edited_S, reported)

    def _mask(self, send: Send) -> None:
        """Adds the masks of grammars."""
        own, grammars = self._places, self._table.grammars
        places = np.array(sorted(self._rules.masks), np.int64)
        rows = SampledRows(places, own.rows_S[places], own.positions_S[places], own.history, send, self._ops)
        bits_PW, may_end = grammars.masks(rows)
        ends = {int(places[at]): grammars.end_of(int(rows.rows_P[at])) for at in may_end}
        self._rules.mask(places.tolist(), bits_PW, ends)


def ruled_sampling(
    captured: DrawReplay | None, table: SamplingTable, ops: FixedSampling | None, places: RuledPlaces
) -> RuledSampling | None:
    """Returns how a capture chooses a step's tokens; None where it does not."""
    if captured is None or ops is None:
        return None
    own = table.captured(places.rows_S, places.prompt_len_S, captured.draw.most_edits, with_rules=True)
    if own is None:
        return None
    rules = table.rules(places.rows_S, places.read_S, places.history)
    return RuledSampling(captured, table, ops, places, own, rules) if captured.draw.has_room(rules) else None


def draw_memory(
    parts: StepParts, most: int, zeros: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
) -> DrawMemory:
    """Allocates it for draws of so many tokens at most."""
    vocab = parts.room.logits_SV.shape[1]
    return DrawMemory(
        zeros((draw_bytes(most, vocab),), torch.uint8),
        zeros((most,), torch.int64),
        zeros((parts.rows.num_groups, most), torch.int64),
        zeros((most,), torch.int64),
        zeros((min(MOST_KEPT, most), vocab), torch.float32),
    )
