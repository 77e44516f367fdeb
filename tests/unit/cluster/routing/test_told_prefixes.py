"""ToldPrefixes: whose keys are compared, when a group is asked for a snapshot, what a prediction is worth. That it says
what real engines have is tests/unit/engine/test_kv_events.py; with losses, test_kv_truth.py there."""

import pytest

from tandem.cluster.routing.prefix_index import EXPECTED_S
from tandem.cluster.routing.told_prefixes import ASK_AGAIN_S, QUIET_LOST_S, WRONG_S, ToldPrefixes, prompt_heads
from tandem.workers.messages.kv_events import KvEvents, KvFacts
from tandem.workers.messages.request import GenerationRequest, Pool, SamplingParams

FACTS = KvFacts("n", "revision", "bfloat16", 16, 8)
TOKENS = FACTS.index_tokens
PROMPT = list(range(1000))


def request(prompt: list[int] = PROMPT, name: str = "r", **more: object) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(), **more)  # type: ignore[arg-type]


HEADS = list(prompt_heads(request(), FACTS))


def snapshot(stored: list[bytes]) -> KvEvents:
    return KvEvents("n", 1, stored=stored, is_snapshot=True)


def told(**groups: list[bytes]) -> ToldPrefixes:
    prefixes = ToldPrefixes()
    for group, stored in groups.items():
        assert not prefixes.take(group, 1, FACTS, 0.0)
        assert not prefixes.take(group, 1, snapshot(stored), 0.0)
    return prefixes


def ask(prefixes: ToldPrefixes, one: GenerationRequest) -> dict[str, tuple[int, int]]:
    return dict(prefixes.overlaps(one).overlaps)


def test_every_eighth_block_has_a_key_and_the_last_token_counts_for_nothing() -> None:
    assert len(HEADS) == 999 // 16 // 8 == 7
    assert [len(list(prompt_heads(request(PROMPT[:n]), FACTS))) for n in (128, 129, 256, 257)] == [0, 1, 1, 2]
    resumed = request(PROMPT[:100], resume_token_ids=[PROMPT[100:]])
    assert list(prompt_heads(resumed, FACTS)) == HEADS, "tokens that another group has delivered are known"
    assert not list(prompt_heads(request(pool=Pool(kind="mean")), FACTS))
    assert list(prompt_heads(request(pool=Pool(kind="last")), FACTS)) == HEADS


def test_an_event_before_the_facts_asks_for_all_but_not_at_once_again() -> None:
    prefixes = ToldPrefixes()
    assert prefixes.take("g", 1, snapshot(HEADS), 0.0)
    assert not prefixes.take("g", 1, snapshot(HEADS), ASK_AGAIN_S / 2)
    assert prefixes.take("g", 1, snapshot(HEADS), ASK_AGAIN_S)
    assert ask(prefixes, request()) == {} and prefixes.least_tokens is None
    prefixes.take("g", 1, FACTS, 2.0)
    assert prefixes.take("g", 1, KvEvents("n", 9), 2.0), "the facts alone are not enough"
    assert not prefixes.take("g", 1, snapshot(HEADS), 2.0)
    assert ask(prefixes, request()) == {"g": (7 * TOKENS, 0)} and prefixes.least_tokens == TOKENS


def test_groups_of_other_blocks_have_an_index_of_their_own() -> None:
    prefixes, other = told(a=HEADS[:3]), KvFacts("n", "revision", "bfloat16", 32, 4)
    prefixes.take("b", 1, other, 0.0)
    prefixes.take("b", 1, snapshot(list(prompt_heads(request(), other))[:5]), 0.0)
    assert ask(prefixes, request()) == {"a": (3 * TOKENS, 0), "b": (5 * TOKENS, 0)}
    prefixes.keep_only(lambda group: group != "a")
    assert ask(prefixes, request()) == {"b": (5 * TOKENS, 0)}
    prefixes.keep_only(lambda group: False)
    assert prefixes.least_tokens is None


def test_a_group_that_comes_back_with_other_facts_is_as_new() -> None:
    prefixes = told(a=HEADS, b=HEADS[:2])
    other = KvFacts("n", "revision", "fp8_e4m3", 16, 8)
    prefixes.take("a", 2, other, 0.0)
    assert ask(prefixes, request()) == {"b": (2 * TOKENS, 0)}
    assert not prefixes.take("a", 1, KvEvents("n", 2, stored=HEADS), 0.0), "an earlier life says nothing more"
    assert not prefixes.take("a", 2, snapshot(list(prompt_heads(request(), other))), 0.0)
    assert ask(prefixes, request()) == {"a": (7 * TOKENS, 0), "b": (2 * TOKENS, 0)}


def test_what_was_sent_is_expected_there_up_to_the_first_key_that_nobody_had() -> None:
    prefixes = told(a=HEADS[:2], b=[])
    one = request()
    prefixes.note("r", prefixes.overlaps(one))
    prefixes.sent("r", "b", 10.0)
    prefixes.sent("another", "b", 10.0)
    prefixes.expect_sent()
    assert ask(prefixes, one) == {"a": (2 * TOKENS, 0), "b": (3 * TOKENS, 0)}
    prefixes.tick(10.0 + EXPECTED_S)
    assert ask(prefixes, one) == {"a": (2 * TOKENS, 0)}


def predicted_wrong(prefixes: ToldPrefixes, now_s: float, found: int = 0, prompt: list[int] = PROMPT) -> bool:
    prefixes.note("r", prefixes.overlaps(request(prompt)))
    return prefixes.found("r", "g", found, now_s)


def test_a_group_that_is_predicted_wrong_for_half_a_minute_is_asked() -> None:
    prefixes, errors = told(g=HEADS), list[int]()
    prefixes.on_error = errors.append
    asked = [second for second in range(100) if predicted_wrong(prefixes, float(second))]
    assert len(asked) == 2 and WRONG_S <= asked[0] <= WRONG_S + 5
    assert set(errors) == {7 * TOKENS}


@pytest.mark.parametrize("found", [7 * TOKENS, 7 * TOKENS + 100])
def test_a_group_that_is_predicted_within_an_index_block_is_not_asked(found: int) -> None:
    prefixes = told(g=HEADS)
    assert not any(predicted_wrong(prefixes, float(second), found) for second in range(100))


def test_wrong_predictions_among_right_ones_are_no_reason_to_ask() -> None:
    prefixes = told(g=HEADS)
    found = [0, 7 * TOKENS]
    assert not any(predicted_wrong(prefixes, float(second), found[second % 2]) for second in range(100))


def test_a_prompt_is_not_predicted_beyond_its_end() -> None:
    """A group says what it has found of the prompt; what was delivered since is not part of it."""
    prefixes, errors = told(g=HEADS), list[int]()
    prefixes.on_error = errors.append
    prefixes.note("r", prefixes.overlaps(request(PROMPT[:200], resume_token_ids=[PROMPT[200:]])))
    assert not prefixes.found("r", "g", 200, 0.0)
    assert errors == [0]


def test_requests_that_nobody_has_noted_or_that_were_forgotten_say_nothing() -> None:
    prefixes, errors = told(g=HEADS), list[int]()
    prefixes.on_error = errors.append
    assert not prefixes.found("r", "g", 0, 0.0)
    prefixes.note("r", prefixes.overlaps(request()))
    prefixes.forget("r")
    prefixes.sent("r", "g", 0.0)
    assert not prefixes.found("r", "g", 0, 0.0)
    prefixes.note("r", prefixes.overlaps(request()))
    assert not prefixes.found("r", "a group that does not tell", 0, 0.0)
    assert errors == []


def test_nothing_is_predicted_of_a_group_that_says_nothing_any_more() -> None:
    """It says once a second that nothing is missing: one that cannot is no longer told where this gateway is."""
    prefixes = told(g=HEADS, quiet=HEADS)
    prefixes.take("g", 1, KvEvents("n", 2), QUIET_LOST_S - 1)
    prefixes.tick(QUIET_LOST_S - 1)
    assert ask(prefixes, request()).keys() == {"g", "quiet"}
    prefixes.tick(QUIET_LOST_S)
    assert ask(prefixes, request()) == {"g": (7 * TOKENS, 0)}
    assert prefixes.take("quiet", 1, KvEvents("n", 2), QUIET_LOST_S + 1), "it is asked for all of it"


def test_last_words_of_groups_that_are_gone_leave_nothing() -> None:
    prefixes = told(g=HEADS)
    prefixes.keep_only(lambda group: False)
    assert prefixes.take("g", 1, KvEvents("n", 2), 1.0)
    prefixes.keep_only(lambda group: False)
    assert not prefixes._asked and not prefixes._groups and not prefixes._indexes
