"""GuessReplays: all passes of a drafter on a device that is ahead of the host, and their draws, as one graph: a launch
for all guesses of a step, or for what a head reads in a step without any.

Shapes are those of steady decodes: of each row a draft model reads two tokens, a head those of the last step, which was
a replay, up to DECODE_QUERIES; then one token a guess. A row with fewer guesses than others is padding in later passes.
Whatever else comes, chunks of prompts among it, the drafter launches pass by pass. Captured by
rank/start/guess_captures.py. T tokens of the first pass, R rows there, S rows with a guess, A asked rows, D drafts of a
row.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from tandem.workers.attention.backend import DECODE_QUERIES
from tandem.workers.attention.forward_batch import ForwardBatch, OnDevice
from tandem.workers.graphs.graph_runner import Outputs
from tandem.workers.kernels.logit_edits import RowTokens
from tandem.workers.kernels.step_arrays import StepArrays
from tandem.workers.models.step_tensors import Heard
from tandem.workers.planning.graph_room import GuessSize, most_edits
from tandem.workers.platforms.device_rows import NO_DRAFT, PassedRows, StepRows, StepTensors
from tandem.workers.rank.captured.frame import NO_GUESSES, Frame, with_room
from tandem.workers.rank.captured.framed_step import StepParts, random_rows, row_edits
from tandem.workers.sampling.sampling_table import CapturedSampling, SamplingTable

Ints = npt.NDArray[np.int64]


class GuessMemory(NamedTuple):
    """Memory that all captures of a drafter share: for arrays, as bytes; the positions of the last step's tokens; the
    guesses, and a row of padding."""

    arrays: torch.Tensor
    positions_T: torch.Tensor
    ids_AD: torch.Tensor


class GuessStep:
    """The static part: room for a step's rows, over which a drafter's passes() runs."""

    def __init__(self, parts: StepParts, size: GuessSize, memory: GuessMemory) -> None:
        assert isinstance(parts.rows, PassedRows)
        self._parts, self._memory, self._rows = parts, memory, parts.rows
        self.size = size
        self._frame = Frame(size.frame, parts.spare, memory.arrays, NO_GUESSES, drafts=False)
        self._ids_AD = memory.ids_AD[: size.num_rows + 1]
        self._bounds = [1]  # the fewest and the most queries of a row

    @property
    def sent(self) -> OnDevice:
        """The arrays of the first pass, with padding."""
        return self._frame.arrays

    @property
    def last(self) -> tuple[Heard, torch.Tensor]:
        """Memory of what replays of steps leave, and where the positions of the last step's tokens are."""
        residual_TH, branch_TH, _, taps = self._parts.room
        return Heard(branch_TH, residual_TH, taps), self._memory.positions_T

    def pad(self) -> None:
        self._frame.pad()

    def fill(self, rows: StepRows, guesses: "AskedGuesses", sampling: CapturedSampling) -> None:
        """Brings a step's arrays to the device. Raises torch.OutOfMemoryError."""
        packed = self._parts.rows.pack(rows)._replace(**guesses.arrays())
        framed = with_room(packed, self.size.frame, self._parts.spare, sampling, drafts=False)
        self._parts.rows.send(rows, framed, StepArrays(), self._frame.inner)
        if guesses.last is not None:
            positions_T = guesses.last[1]
            self._memory.positions_T[: len(positions_T)].copy_(positions_T)

    def warm(self, passes: "Callable[[GuessStep], None]") -> None:
        """Launches all passes on padding, with the kernels for pieces of prompts, which no capture has."""
        self.pad()
        self._bounds = [1, DECODE_QUERIES + 1]
        self.run(passes)
        self._bounds = [1]

    def run(self, passes: "Callable[[GuessStep], None]") -> Outputs:
        self._ids_AD.fill_(NO_DRAFT)
        passes(self)
        return (self._ids_AD,)

    # ---- what passes are made of ----

    def asks(self, place: int) -> torch.Tensor:
        """Returns which of S have a guess at a place."""
        assert self.sent.most_S is not None
        return self.sent.most_S > place

    def rows_at(self, place: int) -> torch.Tensor:
        """Returns the rows S of a pass, padding in place of those without a guess there."""
        return torch.where(self.asks(place), self.sent.rows_B, self._parts.spare.read)

    def later(self, place: int, behind: int) -> OnDevice:
        """Returns the arrays of a pass over one token of each row S, so many places behind the first token that is not
        known, and `behind` before that."""
        sent, rows_S = self.sent, self.rows_at(place)
        count, asks_S = len(rows_S), self.asks(place)
        ones_S, number_S = torch.ones_like(rows_S), torch.arange(count, device=rows_S.device)
        return sent._replace(
            ids_T=torch.zeros_like(rows_S),
            place_T=number_S,
            rows_R=rows_S,
            back_R=torch.where(asks_S, behind - place, 0),
            num_blocks_R=torch.where(asks_S, sent.num_blocks_R[sent.place_T[sent.logits_rows_S]], 1),
            logits_rows_S=number_S,
            starts=torch.arange(count + 1, dtype=torch.int32, device=rows_S.device),
            steps_T=torch.zeros_like(rows_S),
            lens_R=ones_S.int(),
        )

    def tensors(self, sent: OnDevice, behind: int = 0) -> StepTensors:
        """Returns those of a pass. behind: as of PassedRows.pass_tensors."""
        return self._rows.pass_tensors(sent, self.size.num_blocks, None, behind)

    def batch(self, sent: OnDevice, tensors: StepTensors) -> ForwardBatch:
        """Returns a pass's inputs."""
        real_T = sent.rows_R[sent.place_T] != self._parts.spare.read
        return tensors.batch(self._bounds, self._bounds, self._parts.kv.block_size, real_T=real_T)

    def draw(self, logits_SV: torch.Tensor, place: int) -> None:
        """Draws the guesses at a place, as AheadGuesses does, and notes them behind the rows' known tokens. logits_SV:
        float32, overwritten."""
        parts, sent, rows_S, asks_S = self._parts, self.sent, self.rows_at(place), self.asks(place)
        assert parts.ops is not None and sent.asked_S is not None
        positions_S = self._rows.known(rows_S) + place
        tokens = RowTokens(parts.tokens_NL, rows_S, positions_S)
        parts.ops.edit_all(logits_SV, tokens, row_edits(sent), parts.counts_SV[: len(rows_S)])
        best_S, ids_S = parts.ops.best(logits_SV)
        parts.ops.choose_all(logits_SV, best_S, ids_S, positions_S, random_rows(sent, len(rows_S), ids_S.device))
        ids_S = torch.where(torch.isfinite(best_S) & asks_S, ids_S, NO_DRAFT)
        if place:
            ids_S = torch.where(self._ids_AD[sent.asked_S, place - 1] < 0, NO_DRAFT, ids_S)
        self._ids_AD[sent.asked_S, place] = ids_S
        self._rows.note_guesses(torch.where(asks_S, sent.rows_B, parts.spare.written), place, ids_S)


@runtime_checkable
class CapturesPasses(Protocol):
    """A GuessesAhead whose passes a graph may hold. reads_along: as guess_sizes() takes it."""

    reads_along: bool

    def replay_key(self, num_blocks: int) -> Hashable | None:
        """Returns what tells the calls of attention apart, as Decoder.replay_key(); None where it is in no capture."""
        ...

    def hold(self, heard: Heard) -> None:
        """Keeps what passes use from now on where it is. heard: what replays leave."""
        ...

    def passes(self, step: GuessStep) -> None:
        """Gives the device all passes, of as many places as there is room for."""
        ...

    def take(self, replays: "GuessReplays") -> None:
        """Takes the captures."""
        ...


class AskedGuesses(NamedTuple):
    """Guesses of a step's rows. most_S: of each row that samples; asked_S: its place among the rows that were asked,
    which are num_asked, with most drafts each. Of heads: at_T, skipped_R as in StepCopy; last: what the last step has
    left, None where nothing of it is read."""

    most_S: Ints
    asked_S: Ints
    num_asked: int
    most: int
    at_T: Ints = np.empty(0, np.int64)
    skipped_R: Ints = np.empty(0, np.int64)
    last: tuple[Heard, torch.Tensor] | None = None

    def arrays(self) -> dict[str, Ints]:
        return {name: getattr(self, name) for name in ("most_S", "asked_S", "at_T", "skipped_R")}


class SampledColumns(Protocol):
    """The rows of a rank (workers/rank/row_table.py)."""

    sampling: SamplingTable
    num_blocks: Ints
    prompt_len: Ints


@dataclass(frozen=True, slots=True)
class GuessReplay:
    """A captured GuessStep."""

    step: GuessStep
    replay: Callable[[], object]


class GuessReplays:
    """The captures of a drafter, the least ones first. table: of the rank."""

    def __init__(
        self, parts: StepParts, memory: GuessMemory, made: Sequence[GuessReplay], table: SampledColumns
    ) -> None:
        self._parts, self._memory, self._made, self._table = parts, memory, made, table

    def guess(self, rows: StepRows, guesses: AskedGuesses) -> torch.Tensor | None:
        """Returns what GuessesAhead.guess() does, from one replay, until the next one; None, and has changed nothing,
        where no capture does that. rows: of the first pass. Raises torch.OutOfMemoryError."""
        found = self._find(rows, guesses)
        if found is None or not self._is_at_hand(guesses):
            return None
        rows_S, table = rows.sample_rows_S, self._table
        entries = most_edits(found.step.size.num_rows)
        sampling = table.sampling.captured(rows_S, table.prompt_len[rows_S], entries, reports=False)
        if sampling is None:
            return None
        found.step.fill(rows, guesses, sampling)
        found.replay()
        return self._memory.ids_AD[: guesses.num_asked, : guesses.most]

    def _find(self, rows: StepRows, guesses: AskedGuesses) -> GuessReplay | None:
        """Returns the least capture with room for a step, whose rows are decodes."""
        if rows.lens_R.max() > DECODE_QUERIES:
            return None
        wanted = GuessSize(
            num_rows=max(len(rows.rows_R), guesses.num_asked),
            num_places=int(guesses.most_S.max(initial=0)),
            num_tokens=int(rows.starts[-1]),
            num_blocks=int(self._table.num_blocks[rows.rows_R].max()),
        )
        for each in self._made:
            if all(want <= has for want, has in zip(wanted, each.step.size, strict=True)):
                return each
        return None

    def _is_at_hand(self, guesses: AskedGuesses) -> bool:
        """Returns whether what the last step has left is where a replay leaves it."""
        return guesses.last is None or guesses.last[0].residual_TH is self._parts.room.residual_TH
