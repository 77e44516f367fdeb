"""One choice: its text, tokens and end do not depend on how tokens are split into deltas."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.workers.messages.request import SamplingParams, TokenDelta, TokenLogprobs
from tandem.workers.text.choice_text import ChoiceText, TextDelta
from tandem.workers.text.detokenizer import DetokenizerFactory
from tests.unit.gateway.rig import EOS, make_tokenizer

FACTORY = DetokenizerFactory(make_tokenizer())


def deltas(tokens: list[int], cuts: list[int], reason: str, with_logprobs: bool) -> list[TokenDelta]:
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    spans = list(pairwise(bounds)) or [(0, 0)]
    return [
        TokenDelta(
            request_id="r",
            attempt=0,
            choice=0,
            first_position=low,
            token_ids=tokens[low:high],
            logprobs=[TokenLogprobs(t, -1.0) for t in tokens[low:high]] if with_logprobs else None,
            finish_reason=reason if high == len(tokens) else None,  # type: ignore[arg-type]
        )
        for low, high in spans
    ]


def outcome(params: SamplingParams, stream: list[TokenDelta], include: bool) -> tuple[object, ...]:
    choice = ChoiceText(FACTORY.make([1]), params, include_stop=include, eos_token_ids=frozenset({EOS}))
    text, ids, logprobs, reason, keep = "", [], 0, None, None
    for delta in stream:
        addition = choice.take(delta)
        if addition is not None:
            text += addition.text
            ids += addition.token_ids
            logprobs += len(addition.logprobs or ())
            reason = addition.stop_reason if addition.finish_reason else None
            keep = addition.abort_at if addition.abort_at is not None else keep
    assert choice.tokens == len(ids)
    assert not logprobs or logprobs == len(ids)
    assert keep is None or keep == len(ids)
    return text, ids, choice.finished, reason


@given(
    st.binary(max_size=30) | st.text("ab é", max_size=20).map(lambda t: t.encode()),
    st.lists(st.integers(1, 30), max_size=10),
    st.lists(st.text("ab é", min_size=1, max_size=3), max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
)
def test_the_cuts_do_not_matter(
    raw: bytes, cuts: list[int], stops: list[str], include: bool, with_logprobs: bool, reason: str
) -> None:
    tokens = [*raw, EOS] if reason == "stop" else [*raw]
    params = SamplingParams(max_tokens=100, stop=tuple(stops))
    whole = outcome(params, deltas(tokens, [], reason, with_logprobs), include)
    assert outcome(params, deltas(tokens, cuts, reason, with_logprobs), include) == whole
    if not stops:
        assert whole[:3] == (raw.decode("utf-8", "replace"), tokens, reason)


def test_tokens_sent_twice_count_once() -> None:
    choice = ChoiceText(FACTORY.make([1]), SamplingParams(max_tokens=9), include_stop=False, eos_token_ids=frozenset())
    first = TokenDelta(request_id="r", attempt=0, choice=0, first_position=0, token_ids=[97, 98])
    again = TokenDelta(request_id="r", attempt=1, choice=0, first_position=1, token_ids=[98, 99])
    texts = [addition.text for delta in (first, again) if (addition := choice.take(delta)) is not None]
    assert (texts, choice.tokens) == (["ab", "c"], 3)


# ---- one delta after the other ----

X, Y = ord("x"), ord("y")


def choice_of(*, include: bool = False, eos: int = EOS, **params: Any) -> ChoiceText:
    sampling = SamplingParams(max_tokens=100, **params)
    return ChoiceText(FACTORY.make([1]), sampling, include_stop=include, eos_token_ids=frozenset({eos}))


def take(choice: ChoiceText, tokens: list[int] | str, *, logprobs: bool = False, **more: Any) -> TextDelta:
    ids = [ord(char) for char in tokens] if isinstance(tokens, str) else tokens
    entries = [TokenLogprobs(t, -0.5) for t in ids] if logprobs else None
    delta = TokenDelta(
        request_id="r", attempt=0, choice=0, first_position=choice.tokens, token_ids=ids, logprobs=entries, **more
    )
    addition = choice.take(delta)
    assert addition is not None
    return addition


@pytest.mark.parametrize(
    ("settings", "end", "is_shown"),
    [
        ({}, {"finish_reason": "stop", "stop_reason": X}, False),
        ({"eos": X}, {"finish_reason": "stop"}, False),
        ({"stop_token_ids": (X,)}, {"finish_reason": "stop"}, False),
        ({"include": True, "stop_token_ids": (X,)}, {"finish_reason": "stop", "stop_reason": X}, True),
        ({"stop_token_ids": (Y,)}, {"finish_reason": "stop"}, True),
        ({"stop_token_ids": (X,)}, {"finish_reason": "length"}, True),
        ({"eos": X, "stop_token_ids": (X,)}, {"finish_reason": "abort"}, True),
    ],
)
@pytest.mark.parametrize("logprobs", [False, True])
def test_the_token_that_ends_a_choice_is_shown_only_where_it_is_text(
    settings: dict[str, Any], end: dict[str, Any], is_shown: bool, logprobs: bool
) -> None:
    """Only that one: the same token earlier in the answer is text. It is billed either way."""
    choice = choice_of(**settings)
    first = take(choice, "xa", logprobs=logprobs)
    last = take(choice, "xbx", logprobs=logprobs, **end)
    assert (first.text, last.text) == ("xa", "xbx" if is_shown else "xb")
    assert (len(last.token_ids), choice.tokens, choice.finished) == (3, 5, end["finish_reason"])
    assert choice.chars == len(first.text + last.text)


def test_an_end_without_a_token_ends_all_the_same() -> None:
    choice = choice_of()
    take(choice, "ab")
    end = take(choice, [], finish_reason="stop")
    assert (end.text, end.token_ids, end.finish_reason, choice.finished) == ("", [], "stop", "stop")
    assert choice.take(TokenDelta(request_id="r", attempt=0, choice=0, first_position=2, token_ids=[X])) is None


@pytest.mark.parametrize(("reason", "told"), [(None, None), (X, X), (EOS, None)])
def test_the_token_that_stopped_a_choice_is_told_of_unless_it_is_the_models_own_end(
    reason: int | None, told: int | None
) -> None:
    assert take(choice_of(), [reason or EOS], finish_reason="stop", stop_reason=reason).stop_reason == told


def test_offsets_say_where_each_tokens_text_begins() -> None:
    choice = choice_of()
    plain = take(choice, [*"a\u00e9".encode()])
    assert (plain.text, plain.offsets, plain.logprobs) == ("a\u00e9", None, None)
    named = take(choice, [*"b\u20acc".encode()], logprobs=True)
    assert (named.text, named.offsets) == ("b\u20acc", [2, 3, 3, 3, 4])
    cut = take(choice, [*b"d\xc3"], logprobs=True, finish_reason="length")
    assert (cut.text, cut.offsets) == ("d\ufffd", [5, 6])
    assert choice.chars == 7 and choice.logprob_sum == -0.5 * 7


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_choice_with_the_token_that_completes_it(logprobs: bool, include: bool) -> None:
    choice = choice_of(stop=("st",), include=include)
    assert take(choice, "abs", logprobs=logprobs).text == "ab"
    end = take(choice, "ucstop", logprobs=logprobs)
    assert end.text == "suc" + ("st" if include else "")
    assert (end.token_ids, end.finish_reason, end.stop_reason) == ([ord(c) for c in "ucst"], "stop", "st")
    assert end.abort_at == choice.tokens == 7, "the engine goes on until it is told"
    assert choice.finished == "stop" and (end.logprobs is None or len(end.logprobs) == 4)
    assert choice.logprob_sum == (-0.5 * 7 if logprobs else 0.0)


def test_a_choice_that_has_ended_by_itself_is_not_aborted_for_its_stop_string() -> None:
    end = take(choice_of(stop=("st",)), "xst", finish_reason="length")
    assert (end.text, end.finish_reason, end.stop_reason, end.abort_at) == ("x", "stop", "st", None)


def test_what_was_held_back_is_shown_at_the_end() -> None:
    choice = choice_of(stop=("stop",))
    assert take(choice, "xst").text == "x"
    end = take(choice, "o", finish_reason="length")
    assert (end.text, end.finish_reason, end.stop_reason, end.abort_at) == ("sto", "length", None, None)
    late = choice_of(stop=("s\ufffd",))
    end = take(late, [ord("s"), 0xC3], finish_reason="length")
    assert (end.text, end.finish_reason, end.stop_reason) == ("", "stop", "s\ufffd")


def test_logprobs_of_tokens_seen_before_are_skipped_with_them() -> None:
    choice = choice_of()
    take(choice, "abc", logprobs=True)
    entries = [TokenLogprobs(t, -1.0) for t in (98, 99, 100)]
    again = choice.take(
        TokenDelta(request_id="r", attempt=1, choice=0, first_position=1, token_ids=[98, 99, 100], logprobs=entries)
    )
    assert again is not None and (again.token_ids, again.logprobs, again.offsets) == ([100], entries[2:], [3])
    assert choice.logprob_sum == -0.5 * 3 - 1.0
