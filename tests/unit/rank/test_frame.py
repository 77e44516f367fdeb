"""What a captured step is given: a step's arrays with padding behind them, and which of its tokens it draws."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.kernels.logit_edits import ALWAYS, NO_EDITS
from tandem.workers.messages.step import RowSampling
from tandem.workers.planning.graph_room import PADDED_QUERIES, CaptureSize
from tandem.workers.rank.captured.frame import NOTHING, Frame, PaddingRows, with_room
from tandem.workers.sampling.sampling_table import SamplingTable

READ, WRITTEN = 7, 8


@given(lens=st.lists(st.integers(1, 40), max_size=7), has_chunks=st.booleans(), more=st.integers(0, 64))
def test_padding_stands_in_rows_of_its_own_behind_the_steps(lens: list[int], has_chunks: bool, more: int) -> None:
    if not has_chunks:
        lens = [min(length, 3) for length in lens]
    count, rows = sum(lens), len(lens)
    tokens = count + more or 1
    size = CaptureSize(tokens, 4, False, has_chunks, rows + -(-tokens // PADDED_QUERIES) if has_chunks else tokens, 9)
    own = np.arange(rows)
    step = NOTHING._replace(
        ids_T=np.arange(100, 100 + count),
        place_T=np.repeat(own, lens),
        steps_T=np.concatenate([np.empty(0, np.int64), *(np.arange(length) for length in lens)]).astype(np.int64),
        rows_R=own,
        lens_R=np.array(lens, np.int32),
        rows_B=own,
        first_B=own,
        count_B=np.ones(rows, np.int64),
    )
    padded = with_room(step, size, PaddingRows(READ, WRITTEN), None, drafts=True)
    assert padded.ids_T[:count].tolist() == list(range(100, 100 + count)) and not padded.ids_T[count:].any()
    assert padded.starts[-1] == tokens == padded.lens_R.sum() and padded.lens_R[:rows].tolist() == lens
    for token in range(tokens):
        row = padded.place_T[token]
        assert padded.starts[row] + padded.steps_T[token] == token < padded.starts[row + 1]
        assert padded.rows_R[row] == (row if token < count else READ)
        assert token < count or padded.lens_R[row] <= (PADDED_QUERIES if has_chunks else 1)
    assert set(padded.rows_B.tolist()) == {WRITTEN}, "drawn behind the replay"
    assert padded.late_rows_B is not None and padded.late_rows_B.tolist() == own.tolist()
    assert padded.behind_S is not None and (padded.behind_S == -1).all()


def test_a_frame_becomes_padding_again() -> None:
    memory = torch.zeros(4096, dtype=torch.uint8)
    frame = Frame(CaptureSize(4, 2, True, False, 4, 4), PaddingRows(READ, WRITTEN), memory, drafts=False)
    before = memory.clone()
    assert frame.arrays.rows_R.tolist() == [READ] * 4 and frame.arrays.rows_B.tolist() == [WRITTEN] * 4
    assert frame.arrays.slots_T is not None and frame.arrays.slots_T.tolist() == [-1] * 4
    frame.arrays.rows_R.fill_(1)
    frame.pad()
    assert torch.equal(memory, before)


@pytest.mark.parametrize(
    ("sampling", "is_fixed", "is_ruled"),
    [
        ({"temperature": 0.0, "top_k": 4, "top_p": 0.5}, True, True),
        ({"temperature": 0.9, "min_p": 0.1, "seed": 2**64 - 1, "choice": 3}, True, True),
        ({"temperature": 0.9, "top_k": 4, "top_p": 0.99}, True, True),
        ({"temperature": 0.0, "logprobs": 0}, False, True),
        ({"temperature": 0.0, "logprobs": 21}, False, False),
        ({"temperature": 0.0, "logit_bias": ((3, 1.0),), "frequency_penalty": 0.5}, True, True),
        ({"temperature": 0.0, "logit_bias": tuple((i, 1.0) for i in range(20))}, False, False),
        (
            {"temperature": 0.0, "bad_words_token_ids": ((4,), (7,)), "min_tokens": 3, "stop_token_ids": (7, 9)},
            True,
            True,
        ),
        ({"temperature": 0.0, "bad_words_token_ids": ((4, 5),)}, False, True),
        ({"temperature": 0.0, "bad_words_token_ids": (tuple(range(18)),)}, False, False),
        ({"temperature": 0.0, "allowed_token_ids": (4, 5)}, False, True),
        ({"temperature": 0.0, "grammar": "any"}, False, True),
    ],
)
def test_a_capture_draws_what_one_sequence_of_calls_serves(
    sampling: dict[str, object], is_fixed: bool, is_ruled: bool
) -> None:
    """One row that it does not serve is enough. is_ruled: another sequence does, with rules."""
    table = SamplingTable(3, 50)
    table.bind(0, RowSampling(temperature=0.5, seed=9))
    table.bind(2, RowSampling(**sampling))  # type: ignore[arg-type]
    found = table.captured(np.array([2, 0]), np.array([5, 6]), 10)
    assert (found is not None) == is_fixed
    assert (table.captured(np.array([2, 0]), np.array([5, 6]), 10, with_rules=True) is not None) == is_ruled
    if found is not None:
        draws = found.draws
        greedy = sampling["temperature"] == 0.0
        assert draws.factor.tolist() == [0.0 if greedy else pytest.approx(1 / 0.9), 2.0]
        assert draws.seed.tolist() == [sampling.get("seed", 0), 9]
    assert table.captured(np.array([0]), np.array([6]), 10) is not None


def test_a_step_has_the_edits_of_its_rows_side_by_side() -> None:
    """What is forbidden stays so, whatever is added to it; of a row without any there is nothing."""
    table = SamplingTable(3, 50)
    table.bind(0, RowSampling(temperature=0.5))
    both = {"min_tokens": 4, "stop_token_ids": (7, 60), "logit_bias": ((7, 2.0), (3, -1.5))}
    table.bind(1, RowSampling(temperature=0.5, bad_words_token_ids=((3,),), **both))  # type: ignore[arg-type]
    table.bind(2, RowSampling(temperature=0.5, presence_penalty=0.5, repetition_penalty=1.25))
    found = table.captured(np.array([0, 1, 1, 2]), np.array([9, 5, 5, 6]), 10)
    assert found is not None and found.read_rows is not None and found.read_rows.tolist() == [2]
    edits = {name: column.tolist() for name, column in found.edits._asdict().items()}
    assert edits.pop("repetition_S") == [1, 1, 1, 1.25] and edits.pop("presence_S") == [0, 0, 0, 0.5]
    assert edits.pop("frequency_S") == [0] * 4 and edits.pop("prompt_S") == [9, 5, 5, 6]
    entries = sorted(zip(*(edits[name] for name in ("place_E", "id_E", "until_E", "added_E")), strict=True))
    assert entries == [(place, *of) for place in (1, 2) for of in ((3, ALWAYS, -1.5), (7, 9, 2.0))]
    assert table.captured(np.array([1, 1, 1]), np.array([5] * 3), 5) is None, "no room"
    table.free(1)
    table.bind(1, RowSampling(temperature=0.5))
    again = table.captured(np.array([1]), np.array([5]), 5)
    assert again is not None and again.edits is NO_EDITS
