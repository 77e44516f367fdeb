"""Suffix decoding against plain definitions: the search in recent answers, the count of what follows, and what a group
learns from rows that end."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem import LLM, SamplingParams
from tandem.configs.schema import SpeculativeSettings
from tandem.workers.messages.step import RowInit, RowSampling, StepPlan
from tandem.workers.rank.drafts import learn_ended
from tandem.workers.rank.row_table import RowTable
from tandem.workers.speculation import recent_outputs
from tandem.workers.speculation.proposer import EndedRow, LearnsOutputs, ProposalRow
from tandem.workers.speculation.proposers import make_proposer
from tandem.workers.speculation.recent_outputs import NO_TOKEN, RecentOutputs
from tandem.workers.speculation.suffix import SuffixProposer, most_frequent
from tests.support.free_drafts import free_drafts

SUFFIX = {"method": "suffix", "num_speculative_tokens": 16}
NGRAM = {"method": "ngram", "num_speculative_tokens": 16, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def ids(tokens: Sequence[int] | Sequence[Sequence[int]]) -> np.ndarray:
    return np.array(tokens, np.int32)


def proposer_of(**limits: float) -> SuffixProposer:
    keys = {f"suffix_decoding_{name}": value for name, value in limits.items()}
    made = make_proposer(SpeculativeSettings(method="suffix", num_speculative_tokens=16, **keys))  # type: ignore[arg-type]
    assert isinstance(made, SuffixProposer) and isinstance(made, LearnsOutputs)
    return made


class LearntRows:
    """A Proposer that notes what it learns."""

    def __init__(self) -> None:
        self.rows: list[tuple[list[int], int]] = []

    def propose(self, rows: Sequence[ProposalRow]) -> list[Sequence[int]]:
        return [[] for _ in rows]

    def learn(self, rows: Sequence[EndedRow]) -> None:
        self.rows += [(row.token_ids.tolist(), row.prompt_len) for row in rows]


def plain_find(outputs: list[list[int]], last: list[int], behind: int) -> tuple[int, list[list[int]]]:
    """The definition: the longest end of `last` that occurs with a token behind it, and what is behind each place, the
    latest first."""
    for length in range(len(last), 0, -1):
        found = [
            (output[end : end + behind] + [NO_TOKEN] * behind)[:behind]
            for output in reversed(outputs)
            for end in range(len(output) - 1, length - 1, -1)
            if output[end - length : end] == last[-length:]
        ]
        if found:
            return length, found
    return 0, []


def cut_behind(lines: list[list[int]]) -> list[list[int]]:
    """The lines with nothing behind their first NO_TOKEN."""
    return [line[: line.index(NO_TOKEN)] if NO_TOKEN in line else line for line in lines]


@given(
    outputs=st.lists(TEXT, max_size=12),
    last=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    most=st.integers(1, 5),
    room=st.sampled_from([16, 64]),
)
def test_finds_what_a_plain_search_finds(outputs: list[list[int]], last: list[int], most: int, room: int) -> None:
    """Whatever has been overwritten meanwhile."""
    recent, kept = RecentOutputs(most, room), []
    for output in outputs:
        recent.add(ids(output))
        kept.append(output[-(room - 2) :])
        while len(kept) > most or sum(len(one) + 1 for one in kept) >= room:
            kept.pop(0)
    assert len(recent) == len(kept)
    places, length = recent.find(ids(last))
    wanted, lines = plain_find(kept, last, 4)
    assert (length, cut_behind(recent.behind(places, 4).tolist())) == (wanted, cut_behind(lines))


def test_a_search_looks_at_the_latest_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_outputs, "MOST_PLACES", 3)
    recent = RecentOutputs(99, 256)
    for token in range(10, 16):
        recent.add(ids([1, token]))
    places, length = recent.find(ids([7, 1]))
    assert (recent.behind(places, 1)[:, 0].tolist(), length) == ([15, 14, 13], 1)


@given(lines=st.lists(st.lists(st.integers(NO_TOKEN, 2), min_size=4, max_size=4), min_size=1, max_size=9))
@settings(max_examples=50)
def test_guesses_are_the_most_frequent_continuation(lines: list[list[int]]) -> None:
    guessed, expected = most_frequent(ids(lines), 0.3)
    prefix: list[int] = []
    shares = []
    for place in range(4):
        counts = Counter(line[place] for line in lines if line[:place] == prefix and line[place] != NO_TOKEN)
        best, count = counts.most_common(1)[0] if counts else (0, 0)
        if not count or count / len(lines) < 0.3:
            break
        prefix.append(best)
        shares.append(count / len(lines))
    assert guessed == prefix
    assert expected == pytest.approx(sum(shares))


@pytest.mark.parametrize(
    ("limits", "matched", "wanted"),
    [
        ({}, 1, 1),
        ({}, 5, 5),
        ({}, 12, 12),
        ({}, 20, 12),  # a match and its guesses fit into the tree's depth
        ({"max_spec_factor": 2.0}, 3, 6),
        ({"max_spec_factor": 0.5}, 5, 2),
        ({"max_tree_depth": 4}, 9, 2),
        ({"max_cached_requests": 0}, 9, 0),
    ],
)
def test_as_many_guesses_as_the_match_is_long(limits: dict[str, float], matched: int, wanted: int) -> None:
    proposer, text = proposer_of(**limits), list(range(10, 60))
    proposer.learn([EndedRow(ids(text), 0)])
    row = ids([1, 2, *text[:matched]])
    assert proposer.propose([ProposalRow(0, row, 16)]) == [text[matched : matched + wanted]]
    assert proposer.propose([ProposalRow(0, row, 1)]) == [text[matched : matched + min(wanted, 1)]]


def test_the_likelier_of_both_texts_guesses() -> None:
    """Other answers disagree about what follows 5 6; the row itself has said it once."""
    proposer = proposer_of()
    proposer.learn([EndedRow(ids([5, 6, token]), 0) for token in (20, 21)])
    assert proposer.propose([ProposalRow(0, ids([5, 6, 30, 31, 5, 6]), 16)]) == [[30, 31]]
    assert proposer.propose([ProposalRow(0, ids([3, 4, 5, 6]), 16)]) == [[21]]


def test_a_prompt_is_kept_as_far_as_it_is_looked_for() -> None:
    proposer = proposer_of(max_tree_depth=5)
    prompt, answer = [*range(10, 20)], [30, 31, 32]
    proposer.learn([EndedRow(ids(prompt), len(prompt))])  # has said nothing
    assert proposer.propose([ProposalRow(0, ids(prompt), 16)]) == [[]]
    proposer.learn([EndedRow(ids(prompt + answer), len(prompt))])
    assert proposer.propose([ProposalRow(0, ids(prompt), 16), ProposalRow(1, ids(prompt[:5]), 16)]) == [[30, 31], []]


def test_tokens_that_have_not_come_are_not_learnt() -> None:
    """Rows end when they are freed or bound anew, here with a place that a failed step has left; some are beyond the
    table, or have said nothing."""
    table, greedy, learnt = RowTable(3, 64, 4, 99), RowSampling(temperature=0.0), LearntRows()
    inits = [
        RowInit(row=row, token_ids=[row, 2, 3], prompt_len=2 + (row == 2), num_computed=0, sampling=greedy)
        for row in range(3)
    ]
    table.apply(StepPlan(step_id=0, work=[], new_rows=inits))
    table.reserve(np.array([1]))
    plan = StepPlan(step_id=1, work=[], freed_rows=[1, 2, 7], new_rows=inits[:2])
    learn_ended(learnt, plan, table, lambda: table.fill(np.array([1]), [4]))
    assert learnt.rows == [([1, 2, 3, 4], 2), ([0, 2, 3], 2)]
    table.apply(plan)
    table.reserve(np.array([0]))
    learn_ended(learnt, StepPlan(step_id=2, work=[], freed_rows=[0, 1, 2]), table, lambda: None)
    assert learnt.rows[2:] == [([0, 2, 3], 2), ([1, 2, 3], 2)]


def test_what_is_answered_again_is_guessed() -> None:
    """The demo tells a story twice: n-grams guess no better the second time, suffixes nearly all of it."""
    params = SamplingParams(max_tokens=96, temperature=0)
    shares: dict[str, list[float]] = {}
    for config in (SUFFIX, NGRAM):
        with free_drafts(), LLM("demo", dtype="float32", cpu_threads=1, speculative_config=config) as llm:
            for _ in range(2):
                before = llm._engine.stats().drafts
                (answer,) = llm.generate(["Once upon a time"], params, use_tqdm=False)
                after = llm._engine.stats().drafts
                assert before is not None and after is not None
                share = (after.num_accepted - before.num_accepted) / len(answer.outputs[0].token_ids)
                shares.setdefault(str(config["method"]), []).append(share)
    assert shares["suffix"][1] > 0.8 > max(shares["ngram"])
