"""BeamSearch by itself, over random log probabilities: what it keeps, what ends, and that stopping early loses nothing.

That tokens and scores are those of transformers is shown in tests/parity/test_beam_search.py.
"""

import random

import pytest

from tandem.workers.messages.request import TokenLogprobs
from tandem.workers.text.beam_search import Beam, BeamSearch, BeamSearchParams

EOS = {0, 1}


def row(seed: int, tokens: list[int], count: int, spread: float) -> TokenLogprobs:
    draw = random.Random(f"{seed} {tokens}")
    top = sorted(((token, -draw.expovariate(1 / spread)) for token in range(12)), key=lambda pair: -pair[1])[:count]
    return TokenLogprobs(*top[0], top)


def searched(search: BeamSearch, seed: int, spread: float = 2.0) -> tuple[list[Beam], int]:
    """The best beams, and the number of steps."""
    steps = 0
    while not search.is_over:
        search.advance([row(seed, beam.token_ids, search.num_logprobs, spread) for beam in search.live])
        steps += 1
    return search.best(), steps


class Patient(BeamSearch):
    """Goes on to max_tokens whatever may come of it."""

    def _may_improve(self, live: list[Beam]) -> bool:  # type: ignore[override]
        return bool(live)


@pytest.mark.parametrize("length_penalty", [-2.0, -0.5, 0.0, 0.7, 1.0, 2.5])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_stopping_early_loses_nothing(width: int, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=9, length_penalty=length_penalty)
    saved = 0
    for seed in range(60):
        best, steps = searched(BeamSearch(params, EOS, 9), seed)
        wanted, most = searched(Patient(params, EOS, 9), seed)
        assert best == wanted
        saved += most - steps
    assert saved > 0 or length_penalty > 1, "it does stop early"


def test_scores_are_normalized_by_the_output_tokens() -> None:
    assert Beam([5, 6, 0], -3.0, []).score(1.0) == -1.0
    assert Beam([5, 6, 0, 7], -3.0, []).score(0.5) == -1.5
    assert Beam([5, 6], -3.0, []).score(0.0) == -3.0


def test_an_end_that_only_stands_by_is_not_kept() -> None:
    """Of the best four candidates of two beams, only the first two may end."""
    search = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=5), {0}, 5)
    assert search.num_logprobs == 4
    search.advance([TokenLogprobs(7, -0.1, [(7, -0.1), (8, -0.2), (0, -0.3), (9, -0.4)])])
    assert [beam.token_ids for beam in search.live] == [[7], [8]]
    assert search._finished == []
    search.advance([TokenLogprobs(0, -0.1, [(0, -0.1), (9, -5.0)]), TokenLogprobs(9, -1.0, [(9, -1.0)])])
    assert [beam.token_ids for beam in search._finished] == [[7, 0]]
    assert [beam.token_ids for beam in search.live] == [[8, 9], [7, 9]]


def test_a_beam_keeps_as_many_candidates_as_it_is_told() -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=4, ignore_eos=True)
    for num_top, kept in ((0, 0), (3, 3), (None, 4)):
        best, _ = searched(BeamSearch(params, EOS, 4, num_top), 5)
        assert {len(entry.top) for beam in best for entry in beam.logprobs} == {kept}
        assert all(beam.finish_reason == "length" and len(beam.token_ids) == 4 for beam in best)


def test_a_search_that_is_given_up_has_its_live_beams() -> None:
    search = BeamSearch(BeamSearchParams(beam_width=3, max_tokens=50, ignore_eos=True), EOS, 50)
    assert search.best() == [], "nothing has come yet"
    for _ in range(4):
        search.advance([row(1, beam.token_ids, search.num_logprobs, 2.0) for beam in search.live])
    assert [(len(beam.token_ids), beam.finish_reason) for beam in search.best()] == [(4, None)] * 3
