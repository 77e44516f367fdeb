"""Frame: the arrays of a captured step in memory of their own, as many as there is room for; the rest is padding.

Padded tokens belong to rows of padding, which see and write the scratch block; tokens that are padding in S are sampled
for a row that nobody reads. Used by framed_step.py. T tokens, R rows, S tokens that are sampled.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tandem.workers.attention.forward_batch import CHANGES, OnDevice, StepCopy, StepFrame, framed_first
from tandem.workers.kernels.logit_edits import DTYPES, FILLS, NO_EDITS
from tandem.workers.kernels.step_arrays import Array
from tandem.workers.planning.graph_room import PADDED_QUERIES, CaptureSize, most_edits
from tandem.workers.platforms.base import Platform
from tandem.workers.platforms.step_buffer import places_of, views_of
from tandem.workers.sampling.sampling_table import CapturedSampling

SHORT: Final = frozenset({"starts", "lens_R", "slots_T", "slots_S"})
NEEDED: Final = [name for name in StepCopy._fields if name not in StepCopy._field_defaults]
NOTHING: Final = StepCopy[Array](
    **{name: np.empty(0, np.int32 if name in SHORT else np.int64) for name in (*NEEDED, "slots_T", "slots_S")}
)
"""The arrays of a step without rows."""
NO_GUESSES: Final = NOTHING._replace(
    **{name: np.empty(0, np.int64) for name in ("most_S", "asked_S", "at_T", "skipped_R")}
)
"""The arrays of a drafter's passes without rows."""


FRAME_BYTES: Final = 320
"""Bytes of a token in the arrays of a step, with what aligns them."""


def frame_memory(num_tokens: int, platform: Platform) -> torch.Tensor:
    """Allocates memory for the arrays of captures of up to so many tokens."""
    return platform.zeros((FRAME_BYTES * (num_tokens + 16),), torch.uint8)


class PaddingRows(NamedTuple):
    """Rows that stand for padding: one that is read, and one that is written."""

    read: int
    written: int


def with_room(
    step: StepCopy[Array], size: CaptureSize, spare: PaddingRows, sampling: CapturedSampling | None, *, drafts: bool
) -> StepCopy[Array]:
    """Returns a step's arrays with padding behind them. sampling: of its tokens, where the capture samples them; else
    their rows come with the changes. drafts: the capture has places for some."""
    tokens, rows, samples = size.num_tokens, size.num_rows, size.num_samples
    own, each = len(step.rows_R), PADDED_QUERIES if size.has_chunks else 1
    behind = np.arange(tokens - len(step.ids_T))
    lens_R = _room(step.lens_R, rows, 0)
    lens_R[own : own + -(-len(behind) // each)] = each
    lens_R[own + len(behind) // each : own + -(-len(behind) // each)] = len(behind) % each
    starts = np.zeros(rows + 1, np.int32)
    np.cumsum(lens_R, out=starts[1:])
    assert starts[-1] == tokens, f"{own} rows of {len(step.ids_T)} tokens in {size}"
    late: dict[str, Any] = {}
    if sampling is None:
        late = {"late_rows_B": step.rows_B, "late_first_B": step.first_B, "late_count_B": step.count_B}
        step = step._replace(rows_B=step.rows_B[:0], first_B=step.first_B[:0], count_B=step.count_B[:0])
    return step._replace(
        ids_T=_room(step.ids_T, tokens, 0),
        place_T=np.concatenate((step.place_T, own + behind // each)),
        rows_R=_room(step.rows_R, rows, spare.read),
        back_R=_room(step.back_R, rows, 0),
        num_blocks_R=_room(step.num_blocks_R, rows, 1),
        logits_rows_S=_room(step.logits_rows_S, samples, 0),
        starts=starts,
        steps_T=np.concatenate((step.steps_T, behind % each)),
        lens_R=lens_R,
        rows_B=_room(step.rows_B, samples, spare.written),
        first_B=_room(step.first_B, samples, 0),
        count_B=_room(step.count_B, samples, 1),
        slots_T=_room(step.slots_T, tokens, -1) if size.has_adapters else None,
        slots_S=_room(step.slots_S, samples, -1) if size.has_adapters else None,
        behind_S=_room(step.behind_S, samples, -1) if drafts else None,
        draft_T=_room(step.draft_T, tokens, -1) if drafts else None,
        most_S=_beside(step.most_S, samples, 0),
        asked_S=_beside(step.asked_S, samples, samples),
        at_T=_beside(step.at_T, tokens, -1),
        skipped_R=_beside(step.skipped_R, rows, 0),
        **sampling_arrays(sampling, samples, most_edits(samples)),
        **late,
    )


def sampling_arrays(sampling: CapturedSampling | None, samples: int, entries: int) -> dict[str, Any]:
    """Returns the arrays of draws and edits; with padding alone where the capture samples nothing."""
    draws = None if sampling is None else sampling.draws
    edits = (NO_EDITS if sampling is None else sampling.edits)._asdict()
    rooms = {name: entries if name.endswith("_E") else samples for name in edits}
    return {
        "factor_S": _room(None if draws is None else draws.factor, samples, 0, np.float32),
        "lowest_S": _room(None if draws is None else draws.lowest, samples, 0, np.float32),
        "top_k_S": _room(None if draws is None else draws.top_k, samples, 0),
        "top_p_S": _room(None if draws is None else draws.top_p, samples, 1, np.float64),
        "seed_S": _room(None if draws is None else draws.seed.view(np.int64), samples, 0),
        "choice_S": _room(None if draws is None else draws.choice, samples, 0),
        **{
            name: _room(column, rooms[name], fill, dtype)
            for (name, column), fill, dtype in zip(edits.items(), FILLS, DTYPES, strict=True)
        },
    }


class Frame:
    """The arrays of a capture on the device, at the beginning of memory that captures share; `pad` makes all of them
    padding, which is kept there for that."""

    def __init__(
        self,
        size: CaptureSize,
        spare: PaddingRows,
        memory: torch.Tensor,
        nothing: StepCopy[Array] = NOTHING,
        *,
        drafts: bool,
    ) -> None:
        padding = with_room(nothing, size, spare, None, drafts=drafts)
        named = [(name, array) for name, array in framed_first(padding) if name not in CHANGES]
        arrays = [array for _, array in named]
        views = views_of(memory, arrays)
        held = {**dict.fromkeys(NEEDED, memory[:0]), **dict(zip([name for name, _ in named], views, strict=True))}
        self.inner: StepFrame = memory[: places_of(arrays)[1]], OnDevice(**held)
        for view, array in zip(views, arrays, strict=True):
            view.copy_(torch.from_numpy(array))
        self._padding = self.inner[0].clone()

    @property
    def arrays(self) -> OnDevice:
        return self.inner[1]

    @property
    def nbytes(self) -> int:
        return int(self._padding.nbytes)

    def pad(self) -> None:
        """Needs no memory."""
        self.inner[0].copy_(self._padding)


def _beside(array: Array | None, count: int, fill: float) -> Any:
    """Returns the same of an array that only some steps have."""
    return None if array is None else _room(array, count, fill)


def _room(array: Array | None, count: int, fill: float, dtype: Any = np.int64) -> Any:
    """Returns an array, or none, and what fills the rest of its room."""
    room = np.full(count, fill, dtype if array is None else array.dtype)
    if array is not None:
        room[: len(array)] = array
    return room
