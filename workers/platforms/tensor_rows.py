"""DeviceRows in a device's own memory: last tokens, counts and block tables as tensors, one packed copy per step.

The copy holds the step's rows, the tokens that the host knows, and what changed in the columns since the device last
saw these rows; ids, positions and slots are derived on the device. A copy of the columns on the host says what the
device has (of block tables, from told_blocks on). Drafts are guessed and accepted here too, so that the host may be
behind by as many tokens as are in flight. A captured step (rank/captured) derives and adds in its graph. T tokens, R
rows of a step, S tokens that are sampled by B rows, Q rows with drafts, D drafts of a row, N blocks and L tokens of the
longest row, G groups of layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch

from tandem.offload.copies.accelerator import Accelerator
from tandem.offload.kv.kv_groups import UNLIMITED
from tandem.workers.attention.forward_batch import CHANGES, GroupTable, OnDevice, StepCopy, StepFrame, framed_first
from tandem.workers.kernels.step_arrays import Array, StepArrays
from tandem.workers.platforms.device_rows import NO_PLACE, Columns, Guess, Ints, StepDrafts, StepRows, StepTensors
from tandem.workers.platforms.step_buffer import StepBuffer

SPARE_ROWS: Final = 2
"""Rows of padding: the first is read by captured steps, the second written."""
UNKNOWN: Final = -1
"""Stands for a count or a block id on the device."""


class TensorRows:
    """The rows. guess: what guesses drafts here; None: nothing does. keeps_tokens: the rows' tokens may be read here.

    _base, _lives, _blocks: what the device's tensors hold or will when the work given so far has run: known tokens
    without accepted drafts, of which life of the row, and block ids. _told, _told_base: the life of which the device
    has the first tokens, and how many, but for accepted drafts. _guessed: the guesses of the step.
    """

    is_ahead = True

    def __init__(
        self,
        columns: Columns,
        accelerator: Accelerator,
        device: torch.device,
        guess: Guess | None = None,
        *,
        keeps_tokens: bool = False,
    ) -> None:
        self._columns = columns
        self.num_groups = len(columns.windows)
        self._device = device
        self._guess = guess
        self._buffer = StepBuffer(accelerator, device)
        self._late = StepBuffer(accelerator, device)
        self._passes = StepBuffer(accelerator, device)
        self._base = np.zeros_like(columns.num_known)
        self._lives = np.full_like(self._base, UNKNOWN)
        self._told = np.full_like(self._base, UNKNOWN)
        self._told_base = np.zeros_like(self._base)
        self._blocks = np.zeros_like(columns.block_ids)
        self._last_token = torch.zeros(len(self._base) + SPARE_ROWS, dtype=torch.int64, device=device)
        self._num_known = torch.zeros_like(self._last_token)
        self._block_ids = self._last_token.new_zeros((len(self._last_token), *self._blocks.shape[1:])).int()
        self._keeps_tokens = keeps_tokens or guess is not None
        shape = (len(self._last_token), columns.token_ids.shape[1] if self._keeps_tokens else 0)
        self._tokens = torch.zeros(shape, dtype=torch.int32, device=device)
        self._reach_G11 = torch.tensor(_reaches(columns.windows), device=device)[:, None, None]
        self._sampled: tuple[Ints, OnDevice, int, torch.Tensor | None] | None = None
        self._guessed = self._last_token[:0]
        self._is_held = False
        self.has_forgotten = False

    @property
    def guesses(self) -> bool:
        return self._guess is not None

    @property
    def tokens(self) -> torch.Tensor:
        assert self._keeps_tokens, "these rows keep no tokens"
        return self._tokens

    def step(self, rows: StepRows, beside: StepArrays) -> StepTensors:
        width = int(self._columns.num_blocks[rows.rows_R].max())  # as the plan says, on every rank alike
        packed = self.pack(rows)
        sent = self.send(rows, packed, beside)
        with self.forgetting():
            tensors = self.derived(sent, width, notes=rows.read_rows is not None)
        self.expect(np.asarray(packed.rows_B, np.int64), sent, int(packed.count_B.max(initial=1)) - 1, tensors.drafts_S)
        return tensors

    def send_late(self, arrays: StepArrays) -> None:
        arrays.arrive(self._late.fill(arrays.arrays))

    def append(self, ids_S: torch.Tensor | None) -> bool:
        assert self._sampled is not None, "no step has sampled"
        numbers, sent, most, drafts_S = self._sampled
        if ids_S is not None:
            try:
                with self.forgetting():
                    self.add(sent, most, drafts_S, ids_S)
            except torch.OutOfMemoryError:
                return False
        self._base[numbers] += 1
        self._told_base[numbers] += 1
        return True

    # ---- parts of a step, which may be in a capture ----

    def hold(self, scratch_block: int, most_guesses: int) -> tuple[int, int]:
        self._is_held = True
        self._block_ids[-SPARE_ROWS] = scratch_block
        self._guessed = self._last_token.new_zeros(most_guesses)
        return len(self._base), len(self._base) + 1

    def pack(self, rows: StepRows) -> StepCopy[Array]:
        if len(self._columns.num_known) > len(self._base):
            self._grow()
        columns, width = self._columns, int(self._columns.num_blocks[rows.rows_R].max())
        counts = self._changed_counts(rows.rows_R)
        blocks = self._changed_blocks(rows.rows_R, width * len(columns.windows))
        place_T = np.repeat(np.arange(len(rows.rows_R)), rows.lens_R)
        steps_T = np.arange(rows.starts[-1]) - rows.starts[:-1][place_T]
        numbers, first_B, count_B = _runs(rows.sample_rows_S)
        packed = StepCopy[Array](
            ids_T=columns.token_ids[rows.rows_R[place_T], rows.begin_R[place_T] + steps_T].astype(np.int64),
            place_T=place_T,
            rows_R=rows.rows_R,
            back_R=columns.num_known[rows.rows_R] - rows.begin_R,
            num_blocks_R=columns.num_blocks[rows.rows_R],
            logits_rows_S=rows.logits_rows_S,
            starts=rows.starts.astype(np.int32),
            steps_T=steps_T,
            lens_R=rows.lens_R.astype(np.int32),
            count_rows=counts,
            counts=columns.num_known[counts],
            block_places=blocks,
            blocks=self._blocks.reshape(-1)[blocks],
            rows_B=numbers,
            first_B=first_B,
            count_B=count_B,
            slots_T=rows.slots_T,
            slots_S=rows.slots_S,
        )
        if rows.drafts is not None:
            packed = _with_drafts(packed, rows, rows.drafts)
        if rows.read_rows is not None or _guesses_here(rows):
            packed = self._with_untold(packed, rows)
        return packed

    def send(
        self, rows: StepRows, packed: StepCopy[Array], beside: StepArrays, frame: StepFrame | None = None
    ) -> OnDevice:
        names = framed_first(packed)
        first = 0 if frame is None else sum(name not in CHANGES for name, _ in names)
        with self.forgetting():
            tensors = iter(self._buffer.fill([*(array for _, array in names), *beside.arrays], first))
            arrays = {name: tensor for (name, _), tensor in zip(names[first:], tensors, strict=False)}
            beside.arrive([*tensors])
            if frame is not None:
                frame[0].copy_(self._buffer.on_device[: len(frame[0])])
            sent = OnDevice(**arrays) if frame is None else frame[1]._replace(**arrays)
            self._take_changes(sent)
            if sent.rows_Q is not None and rows.drafts is not None:
                self._take_guesses(sent, rows, rows.drafts)
        self.has_forgotten = False
        return sent

    def expect(self, numbers: Ints, sent: OnDevice, most: int, drafts_S: torch.Tensor | None) -> None:
        self._sampled = numbers, sent, most, drafts_S

    # ---- passes of a drafter ----

    def send_passes(self, passes: Sequence[StepRows], beside: StepArrays) -> list[OnDevice]:
        named = [framed_first(self.pack(rows)) for rows in passes]
        with self.forgetting():
            arrays = [array for names in named for _, array in names]
            tensors = iter(self._passes.fill([*arrays, *beside.arrays]))
            sent = [OnDevice(**{name: next(tensors) for name, _ in names}) for names in named]
            beside.arrive([*tensors])
            self._take_changes(sent[0])
        self.has_forgotten = False
        return sent

    def pass_tensors(
        self, sent: OnDevice, width: int, begin_R: torch.Tensor | None = None, behind: int = 0
    ) -> StepTensors:
        if begin_R is not None:
            sent = sent._replace(back_R=self._num_known[sent.rows_R] - begin_R)
        tensors = self.derived(sent, width, notes=False)
        columns_T = (tensors.positions_T + behind).clamp(max=self._tokens.shape[1] - 1)
        return tensors._replace(input_ids_T=self._tokens[sent.rows_R[sent.place_T], columns_T].long())

    def known(self, rows_R: torch.Tensor) -> torch.Tensor:
        return self._num_known[rows_R]

    def note_guesses(self, rows_Q: torch.Tensor, place: int, ids_Q: torch.Tensor) -> None:
        columns_Q = (self._num_known[rows_Q] + place).clamp(max=self._tokens.shape[1] - 1)
        self._tokens[rows_Q, columns_Q] = ids_Q.clamp(min=0).int()

    # ---- inside ----

    def _take_changes(self, sent: OnDevice) -> None:
        """Brings the device's rows up to what the host has changed."""
        if len(sent.counts):
            self._num_known.index_copy_(0, sent.count_rows, sent.counts)
        if len(sent.blocks):
            self._block_ids.view(-1).index_copy_(0, sent.block_places, sent.blocks)
        if sent.told is not None and len(sent.told):
            self._tokens.view(-1).index_copy_(0, sent.told_places, sent.told)

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self.has_forgotten = True
            self._lives.fill(UNKNOWN)
            self._told.fill(UNKNOWN)
            self._blocks.fill(UNKNOWN)
            self._columns.told_blocks.fill(0)
            raise

    def _changed_counts(self, rows_R: Ints) -> Ints:
        """Notes the rows whose tokens the host has changed, but for drafts that were accepted here first; returns
        them."""
        columns = self._columns
        base_R, lives_R = columns.num_known[rows_R] - columns.num_accepted[rows_R], columns.lives[rows_R]
        changed = rows_R[(base_R != self._base[rows_R]) | (lives_R != self._lives[rows_R])]
        self._base[rows_R], self._lives[rows_R] = base_R, lives_R
        return changed

    def _changed_blocks(self, rows_R: Ints, width: int) -> Ints:
        """Notes the rows' block ids that the host has changed; returns their places in the flat table."""
        columns, told, groups = self._columns, self._columns.told_blocks, len(self._columns.windows)
        rows_C = rows_R[told[rows_R] < columns.num_blocks[rows_R] * groups]
        first = int(told[rows_C].min(initial=width))
        now_CN = columns.block_ids[rows_C, first:width]
        place_C, column = np.nonzero(now_CN != self._blocks[rows_C, first:width])
        self._blocks[rows_C, first:width] = now_CN
        told[rows_C] = columns.num_blocks[rows_C] * groups
        return np.asarray(rows_C[place_C] * self._blocks.shape[1] + first + column)

    def _with_untold(self, packed: StepCopy[Array], rows: StepRows) -> StepCopy[Array]:
        """Notes that the device gets the tokens of rows that are read here or have drafts that are guessed here; adds
        those that the host has read and the device lacks. What was sampled since a row was bound, the device has
        noted."""
        columns = self._columns
        asked = [np.empty(0, np.int64) if rows.read_rows is None else rows.read_rows]
        if _guesses_here(rows) and rows.drafts is not None:
            asked.append(rows.rows_R[rows.drafts.most_R > 0])
        numbers = np.unique(np.concatenate(asked))
        known, accepted = columns.num_known[numbers], columns.num_accepted[numbers]
        is_new = self._told[numbers] != columns.lives[numbers]
        firsts = np.where(is_new, 0, self._told_base[numbers] + accepted)
        ends = known - columns.num_unread[numbers]
        self._told[numbers], self._told_base[numbers] = columns.lives[numbers], known - accepted
        lacks, width = np.flatnonzero(firsts < ends), columns.token_ids.shape[1]
        spans = [np.arange(firsts[at], ends[at]) + numbers[at] * width for at in lacks]
        places = np.concatenate([np.empty(0, np.int64), *spans])
        return packed._replace(told_places=places, told=columns.token_ids.reshape(-1)[places])

    def derived(self, sent: OnDevice, width: int, *, notes: bool) -> StepTensors:
        rows_R, place_T, size = sent.rows_R, sent.place_T, self._columns.block_size
        begin_R = self._num_known[rows_R] - sent.back_R
        positions_T = begin_R[place_T] + sent.steps_T
        ids_T = torch.where(sent.ids_T < 0, self._last_token[rows_R][place_T], sent.ids_T)
        drafts_S = None
        if sent.behind_S is not None:
            if sent.draft_T is not None:
                ids_T = torch.where(sent.draft_T >= 0, self._guessed[sent.draft_T.clamp(min=0)], ids_T)
            drafts_S = torch.where(sent.behind_S >= 0, ids_T[sent.behind_S.clamp(min=0)], NO_PLACE)
            ids_T = ids_T.clamp(min=0)
            if notes:  # behind the known tokens, until the sampled ones take their places
                columns_T = positions_T.clamp(max=self._tokens.shape[1] - 1)
                self._tokens[rows_R[place_T], columns_T] = ids_T.int()
        tables_GRN = self._own_blocks(sent, begin_R, width)
        slots_GT = tables_GRN[:, place_T, positions_T // size].long() * size + positions_T % size
        groups = [GroupTable(slots_T, table_RN) for slots_T, table_RN in zip(slots_GT, tables_GRN, strict=True)]
        return StepTensors(
            ids_T,
            positions_T,
            groups[0].slot_mapping_T,
            sent.starts,
            begin_R.int() + sent.lens_R,
            groups[0].block_table_RN,
            sent.logits_rows_S,
            sent.slots_T,
            sent.slots_S,
            drafts_S,
            tuple(groups[1:]),
        )

    def _own_blocks(self, sent: OnDevice, begin_R: torch.Tensor, width: int) -> torch.Tensor:
        """Returns what own_blocks() of device_rows.py does, for all groups [G, R, N]."""
        num_groups = len(self._columns.windows)
        table_RNG = self._block_ids[sent.rows_R, : width * num_groups].unflatten(1, (width, num_groups))
        tables_GRN = table_RNG.permute(2, 0, 1).contiguous()
        place_N = torch.arange(width, device=self._device)
        first_GR1 = (begin_R[:, None] - self._reach_G11).clamp(min=0) // self._columns.block_size
        seen_GRN = (place_N < sent.num_blocks_R[:, None]) & (place_N >= first_GR1)
        return torch.where(seen_GRN, tables_GRN, tables_GRN.gather(2, first_GR1))

    def _take_guesses(self, sent: OnDevice, rows: StepRows, drafts: StepDrafts) -> None:
        """Guesses the step's drafts, unless they are there."""
        guesses_QD = drafts.guesses_QD
        if guesses_QD is None:
            assert self._guess is not None and sent.rows_Q is not None and sent.most_Q is not None, "nothing guesses"
            tokens_QL = self._tokens[:, : int(rows.most_R.max())][sent.rows_Q]
            guesses_QD = self._guess(tokens_QL, self._num_known[sent.rows_Q], sent.most_Q, int(drafts.most_R.max()))
        if self._is_held:
            self._guessed[: guesses_QD.numel()].view(guesses_QD.shape).copy_(guesses_QD)
        else:
            self._guessed = guesses_QD.flatten()

    def add(self, sent: OnDevice, most: int, drafts_S: torch.Tensor | None, ids_S: torch.Tensor) -> None:
        known_B, place_D = self._num_known[sent.rows_B], torch.arange(most + 1, device=self._device)
        at_BD = sent.first_B[:, None] + torch.minimum(place_D, sent.count_B[:, None] - 1)
        ids_BD = ids_S.clamp(min=0)[at_BD]
        accepted_B1 = torch.zeros_like(known_B)[:, None]
        if drafts_S is not None:
            same_BD = (ids_S == drafts_S)[at_BD] & (place_D < sent.count_B[:, None] - 1)
            accepted_B1 = same_BD.long().cumprod(1).sum(1, keepdim=True)
        if self._keeps_tokens:
            column_BD = (known_B[:, None] + place_D).clamp(max=self._tokens.shape[1] - 1)
            self._tokens[sent.rows_B[:, None], column_BD] = ids_BD.int()
        self._last_token.index_copy_(0, sent.rows_B, ids_BD.gather(1, accepted_B1)[:, 0])
        self._num_known.index_copy_(0, sent.rows_B, known_B + 1 + accepted_B1[:, 0])

    def _grow(self) -> None:
        """Follows columns that have grown: rows beyond the settings' are rare."""
        assert not self._is_held, "a row beyond --max-num-seqs"
        more = len(self._columns.num_known) - len(self._base)
        self._last_token, self._num_known, self._block_ids, self._tokens = (
            torch.cat((held, held.new_zeros((more, *held.shape[1:]))))
            for held in (self._last_token, self._num_known, self._block_ids, self._tokens)
        )
        self._base, self._lives, self._told, self._told_base = (
            np.append(held, np.full(more, UNKNOWN, np.int64))
            for held in (self._base, self._lives, self._told, self._told_base)
        )
        self._blocks = np.append(self._blocks, np.zeros((more, self._blocks.shape[1]), np.int32), axis=0)


def _guesses_here(rows: StepRows) -> bool:
    """Returns whether drafts are looked up in the rows' tokens here."""
    return rows.drafts is not None and rows.drafts.guessed and rows.drafts.guesses_QD is None


def _with_drafts(packed: StepCopy[Array], rows: StepRows, drafts: StepDrafts) -> StepCopy[Array]:
    packed = packed._replace(behind_S=np.where(drafts.behind_S, rows.logits_rows_S + 1, -1))
    if not drafts.guessed:
        return packed
    with_drafts = np.flatnonzero(drafts.most_R)
    most_Q = drafts.most_R[with_drafts]
    order_R = np.cumsum(drafts.most_R > 0) - 1
    number_T = packed.steps_T - (rows.lens_R - drafts.most_R)[packed.place_T]
    draft_T = np.where(number_T >= 0, order_R[packed.place_T] * most_Q.max() + number_T, -1)
    return packed._replace(rows_Q=rows.rows_R[with_drafts], most_Q=most_Q, draft_T=draft_T)


def _reaches(windows: Sequence[int | None]) -> list[int]:
    """Returns how far back the tokens of each group of layers see."""
    return [UNLIMITED if window is None else window - 1 for window in windows]


def _runs(rows_S: Ints) -> tuple[Ints, Ints, Ints]:
    """Returns each row once, where it begins, and how often it stands there in succession."""
    first_B = np.flatnonzero(np.diff(rows_S, prepend=-1))
    return rows_S[first_B], first_B, np.diff(first_B, append=len(rows_S))
